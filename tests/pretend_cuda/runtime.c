/* The functions of the CUDA runtime whose answers torch reads: one H100, whose memory is this machine's.
 *
 * build.py adds a function that does nothing and succeeds for every other function that torch imports. No kernel ever runs,
 * so "device" memory holds whatever malloc returned. */
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

enum { DEVICE_GIB = 80, CUDA_13 = 13000 };

/* Every call below answers with success unless it says otherwise. */
#define ANSWER(name, parameters, ...) \
  cudaError_t name parameters { \
    __VA_ARGS__; \
    return cudaSuccess; \
  }

ANSWER(cudaGetDeviceCount, (int *count), *count = 1)
ANSWER(cudaGetDevice, (int *device), *device = 0)
ANSWER(cudaDriverGetVersion, (int *version), *version = CUDA_13)
ANSWER(cudaRuntimeGetVersion, (int *version), *version = CUDA_13)
ANSWER(cudaDeviceGetAttribute, (int *value, enum cudaDeviceAttr attribute, int device), *value = 1)
ANSWER(cudaDeviceCanAccessPeer, (int *can, int device, int peer), *can = 0)
ANSWER(cudaDeviceGetStreamPriorityRange, (int *least, int *greatest), *least = 0; *greatest = -1)
ANSWER(cudaMemGetInfo, (size_t *available, size_t *total), *available = *total = (size_t)DEVICE_GIB << 30)
ANSWER(cudaStreamIsCapturing, (cudaStream_t stream, enum cudaStreamCaptureStatus *status), *status = 0)

const char *cudaGetErrorString(cudaError_t error) { return "an error of the pretended CUDA runtime"; }

/* Handles must differ from null; nothing looks behind them. */
static char handles[1 << 16];
static char *new_handle(void) {
  static size_t used;
  return &handles[used++ % sizeof handles];
}
ANSWER(cudaStreamCreateWithPriority, (cudaStream_t *stream, unsigned flags, int priority), *stream = (cudaStream_t)new_handle())
ANSWER(cudaEventCreateWithFlags, (cudaEvent_t *event, unsigned flags), *event = (cudaEvent_t)new_handle())

/* torch chooses kernels by compute capability 9.0 and sizes grids by the number of multiprocessors. */
ANSWER(cudaGetDeviceProperties, (struct cudaDeviceProp *properties, int device),
       *properties = (struct cudaDeviceProp){.name = "pretended H100", .major = 9, .minor = 0, .warpSize = 32,
                                             .multiProcessorCount = 132, .maxThreadsPerMultiProcessor = 2048,
                                             .regsPerMultiprocessor = 65536, .sharedMemPerMultiprocessor = 233472,
                                             .sharedMemPerBlock = 49152, .sharedMemPerBlockOptin = 232448,
                                             .maxThreadsPerBlock = 1024, .l2CacheSize = 50 << 20,
                                             .totalGlobalMem = (size_t)DEVICE_GIB << 30})

static cudaError_t allocate(void **memory, size_t size) {
  *memory = calloc(1, size);
  return *memory ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaMalloc(void **memory, size_t size) { return allocate(memory, size); }
cudaError_t cudaHostAlloc(void **memory, size_t size, unsigned flags) { return allocate(memory, size); }
ANSWER(cudaFree, (void *memory), free(memory))
ANSWER(cudaFreeHost, (void *memory), free(memory))
ANSWER(cudaMemcpyAsync, (void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream),
       memcpy(to, from, size))
