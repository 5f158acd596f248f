package outrider

import (
	"context"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"outrider/clients/go/outriderv1"
)

const draftRefusedKey = "outrider-draft-refused"

// Client reaches one address. Target and Draft are the generated clients, for everything not named here.
type Client struct {
	Target outriderv1.TargetServiceClient
	Draft  outriderv1.DraftServiceClient
	conn   *grpc.ClientConn
	calls  *calls
}

// Dial prepares a client of HOST:PORT or unix:PATH. It connects at the first call. It fails for an address that is
// neither, and for TLS files that cannot be used.
func Dial(address string, options Options) (*Client, error) {
	calls := &calls{address: address, options: options.withDefaults()}
	conn, err := calls.connect()
	if err != nil {
		return nil, err
	}
	return &Client{outriderv1.NewTargetServiceClient(conn), outriderv1.NewDraftServiceClient(conn), conn, calls}, nil
}

// Close cancels what runs and closes the connection.
func (c *Client) Close() error { return c.conn.Close() }

// User is a conversation of one message.
func User(content string) []*outriderv1.ChatMessage {
	return []*outriderv1.ChatMessage{{Role: "user", Content: content}}
}

// Chat streams the answer to a conversation: handle gets a chunk per step of the engine, or per few. It returns when the
// answer is complete, with the error of the call, or with the first error of handle, which cancels the request.
func (c *Client) Chat(
	ctx context.Context,
	messages []*outriderv1.ChatMessage,
	sampling *outriderv1.SamplingParameters,
	handle func(*outriderv1.GenerateChunk) error,
	options ...grpc.CallOption,
) error {
	input := &outriderv1.GenerateRequest_Chat{Chat: &outriderv1.ChatInput{Messages: messages}}
	return c.Generate(ctx, &outriderv1.GenerateRequest{Input: input, Sampling: sampling},
		func(response *outriderv1.GenerateResponse) error {
			if chunk := response.GetChunk(); chunk != nil {
				return handle(chunk)
			}
			return nil
		}, options...)
}

// DraftRefused says why the draft service did not draft for a request, or not to its end, such as UnknownCorpus; it is
// empty when nothing was refused. The answer is complete and the same without drafts. The trailer is what
// grpc.Trailer(&trailer), an option of Chat and Generate, has when they return, also with an error.
func DraftRefused(trailer metadata.MD) Reason {
	if told := trailer.Get(draftRefusedKey); len(told) > 0 {
		return Reason(told[0])
	}
	return ""
}

// Generate is Chat for any request, and handles every event. A request that the service asks to send again later is
// sent again, as long as nothing was answered yet. Without a deadline of the context, the client's GenerateTimeout holds.
func (c *Client) Generate(
	ctx context.Context,
	request *outriderv1.GenerateRequest,
	handle func(*outriderv1.GenerateResponse) error,
	options ...grpc.CallOption,
) error {
	ctx, cancel := withDeadline(ctx, c.calls.options.GenerateTimeout)
	defer cancel()
	var stream outriderv1.TargetService_GenerateClient
	var response *outriderv1.GenerateResponse
	err := c.calls.retry(ctx, func() (err error) {
		if stream, err = c.Target.Generate(ctx, request, options...); err != nil {
			return err
		}
		response, err = stream.Recv()
		return err
	})
	for ; err == nil; response, err = stream.Recv() {
		if err := handle(response); err != nil {
			return err
		}
	}
	if err == io.EOF {
		return nil
	}
	return err
}
