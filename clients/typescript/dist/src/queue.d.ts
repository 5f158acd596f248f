/** Frames to send: pushed by the caller, pulled by the transport. */
export declare class FrameQueue<Frame> implements AsyncIterable<Frame> {
    #private;
    push(frame: Frame): void;
    /** Half-closes the stream once everything pushed has been sent. */
    end(): void;
    [Symbol.asyncIterator](): AsyncGenerator<Frame>;
}
