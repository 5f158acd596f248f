package outrider

import (
	"context"
	"io"
	"net"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"outrider/clients/go/outriderv1"
)

// Client reaches one address. Target and Draft are the generated clients, for everything not named here.
type Client struct {
	Target outriderv1.TargetServiceClient
	Draft  outriderv1.DraftServiceClient
	conn   *grpc.ClientConn
}

// Dial prepares a client of HOST:PORT or unix:PATH. It connects at the first call. Without options it speaks plain
// text; pass grpc.WithTransportCredentials for TLS. A token is metadata of the call's context, see WithToken.
func Dial(address string, options ...grpc.DialOption) (*Client, error) {
	if len(options) == 0 {
		options = append(options, grpc.WithInsecure())
	}
	if path := strings.TrimPrefix(address, "unix:"); path != address {
		address = "passthrough:///localhost"
		options = append(options, grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}))
	}
	conn, err := grpc.Dial(address, options...)
	if err != nil {
		return nil, err
	}
	return &Client{outriderv1.NewTargetServiceClient(conn), outriderv1.NewDraftServiceClient(conn), conn}, nil
}

// WithToken adds a bearer token to the calls made with the context.
func WithToken(ctx context.Context, token string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
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
) error {
	input := &outriderv1.GenerateRequest_Chat{Chat: &outriderv1.ChatInput{Messages: messages}}
	return c.Generate(ctx, &outriderv1.GenerateRequest{Input: input, Sampling: sampling},
		func(response *outriderv1.GenerateResponse) error {
			if chunk := response.GetChunk(); chunk != nil {
				return handle(chunk)
			}
			return nil
		})
}

// Generate is Chat for any request, and handles every event.
func (c *Client) Generate(
	ctx context.Context,
	request *outriderv1.GenerateRequest,
	handle func(*outriderv1.GenerateResponse) error,
) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.Target.Generate(ctx, request)
	if err != nil {
		return err
	}
	for {
		response, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if err := handle(response); err != nil {
			return err
		}
	}
}
