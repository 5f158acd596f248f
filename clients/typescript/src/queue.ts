/** Frames to send: pushed by the caller, pulled by the transport. */
export class FrameQueue<Frame> implements AsyncIterable<Frame> {
  readonly #waiting: Frame[] = [];
  #wake: () => void = () => {};
  #ended = false;

  push(frame: Frame): void {
    this.#waiting.push(frame);
    this.#wake();
  }

  /** Half-closes the stream once everything pushed has been sent. */
  end(): void {
    this.#ended = true;
    this.#wake();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Frame> {
    for (;;) {
      for (let frame = this.#waiting.shift(); frame !== undefined; frame = this.#waiting.shift()) yield frame;
      if (this.#ended) return;
      await new Promise<void>((resolve) => (this.#wake = resolve));
    }
  }
}
