/* The one function of the CUDA driver whose answer torch reads: the device is in use by this process. */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
  *flags = 0;
  *is_active = 1;
  return 0;
}
