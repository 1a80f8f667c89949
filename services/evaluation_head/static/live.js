// The connection to the head: a WebSocket that is reopened when it breaks, after growing pauses.

const KEY = "jobgroup-token";
const REFUSED = 4401;
const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 8000;
// The head sends a message every second, so a connection that is silent for long is dead.
const SILENT_MILLISECONDS = 8000;

export class Live {
  #handlers;
  #socket = null;
  #pause = FIRST_PAUSE;
  #timer = null;
  #silence = null;

  /** ``handlers``: onMessage(data), onLost(reason), onRefused(). */
  constructor(handlers) {
    this.#handlers = handlers;
    window.addEventListener("online", () => this.#socket?.readyState === WebSocket.OPEN || this.connect());
  }

  connect() {
    clearTimeout(this.#timer);
    this.#drop();
    const address = new URL("ws", document.baseURI);
    address.protocol = address.protocol.replace("http", "ws");
    const socket = (this.#socket = new WebSocket(address));
    socket.addEventListener("open", () => {
      const token = sessionStorage.getItem(KEY);
      if (token !== null) socket.send(JSON.stringify({ token }));
      this.#listenForSilence(socket);
    });
    socket.addEventListener("message", (event) => {
      this.#pause = FIRST_PAUSE;
      this.#listenForSilence(socket);
      this.#handlers.onMessage(JSON.parse(event.data));
    });
    socket.addEventListener("close", (event) => this.#closed(socket, event));
  }

  /** The reply of POST ``path`` without a body. */
  async post(path) {
    const token = sessionStorage.getItem(KEY);
    const response = await fetch(path, { method: "POST", headers: token === null ? {} : { Authorization: `Bearer ${token}` } });
    const reply = await response.json();
    if (!response.ok) throw new Error(reply.detail ?? String(response.status));
    return reply;
  }

  #closed(socket, event) {
    if (socket !== this.#socket) return;
    this.#drop();
    if (event.code === REFUSED) {
      this.#handlers.onRefused();
      return;
    }
    this.#handlers.onLost(event.reason || "the connection broke");
    this.#timer = setTimeout(() => this.connect(), this.#pause * (0.75 + Math.random() / 2));
    this.#pause = Math.min(2 * this.#pause, LONGEST_PAUSE);
  }

  #listenForSilence(socket) {
    clearTimeout(this.#silence);
    this.#silence = setTimeout(() => this.#closed(socket, { reason: "it fell silent" }), SILENT_MILLISECONDS);
  }

  #drop() {
    clearTimeout(this.#silence);
    const socket = this.#socket;
    this.#socket = null;
    socket?.close();
  }
}
