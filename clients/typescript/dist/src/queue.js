/** Frames to send: pushed by the caller, pulled by the transport. */
export class FrameQueue {
    #waiting = [];
    #wake = () => { };
    #ended = false;
    push(frame) {
        this.#waiting.push(frame);
        this.#wake();
    }
    /** Half-closes the stream once everything pushed has been sent. */
    end() {
        this.#ended = true;
        this.#wake();
    }
    async *[Symbol.asyncIterator]() {
        for (;;) {
            for (let frame = this.#waiting.shift(); frame !== undefined; frame = this.#waiting.shift())
                yield frame;
            if (this.#ended)
                return;
            await new Promise((resolve) => (this.#wake = resolve));
        }
    }
}
