package outrider

import (
	"context"
	"io"
	"math/rand"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

const tokenKey = "authorization"

// calls is what every call of a client has in common: the token, the deadline, retries and typed errors.
type calls struct {
	address string
	options Options
}

func (c *calls) unary(
	ctx context.Context, method string, request, reply any,
	conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption,
) error {
	ctx, cancel := withDeadline(c.authorised(ctx), c.options.Timeout)
	defer cancel()
	return c.retry(ctx, func() error {
		return c.typed(invoke(ctx, method, request, reply, conn, options...))
	})
}

// stream adds no deadline and no retries: a stream may live for days, and what was sent cannot be sent again unseen.
func (c *calls) stream(
	ctx context.Context, description *grpc.StreamDesc, conn *grpc.ClientConn,
	method string, open grpc.Streamer, options ...grpc.CallOption,
) (grpc.ClientStream, error) {
	stream, err := open(c.authorised(ctx), description, conn, method, options...)
	if err != nil {
		return nil, c.typed(err)
	}
	return &typedStream{stream, c}, nil
}

// authorised adds the client's token, unless the caller's context has one.
func (c *calls) authorised(ctx context.Context) context.Context {
	given, _ := metadata.FromOutgoingContext(ctx)
	if c.options.Token == "" || len(given.Get(tokenKey)) > 0 {
		return ctx
	}
	return WithToken(ctx, c.options.Token)
}

func (c *calls) typed(err error) error {
	if err == nil || err == io.EOF {
		return err
	}
	return errorOf(err, c.address)
}

// retry makes the call until it succeeds, fails for good, or the attempts or the time are used up. It waits as long as
// the service's RetryInfo asks, twice as long each time, and a little longer at random so that callers spread out.
func (c *calls) retry(ctx context.Context, call func() error) error {
	for attempt := 1; ; attempt++ {
		err := call()
		if err == nil {
			return nil
		}
		after := ErrorOf(err).RetryAfter
		if after <= 0 || attempt >= c.options.Attempts {
			return err
		}
		wait := after << (attempt - 1)
		wait += time.Duration(rand.Int63n(int64(wait)/4 + 1))
		if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= wait {
			return err
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return c.typed(ctx.Err())
		}
	}
}

// WithToken adds a bearer token to the calls made with the context, in place of the client's own.
func WithToken(ctx context.Context, token string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, tokenKey, "Bearer "+token)
}

func withDeadline(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if _, set := ctx.Deadline(); set || timeout < 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, timeout)
}

// typedStream is a stream whose errors are of this package.
type typedStream struct {
	grpc.ClientStream
	calls *calls
}

func (s *typedStream) Header() (metadata.MD, error) {
	header, err := s.ClientStream.Header()
	return header, s.calls.typed(err)
}

func (s *typedStream) SendMsg(message any) error {
	return s.calls.typed(s.ClientStream.SendMsg(message))
}

func (s *typedStream) RecvMsg(message any) error {
	return s.calls.typed(s.ClientStream.RecvMsg(message))
}
