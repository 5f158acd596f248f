package outrider

import (
	"context"
	"fmt"
	"io"

	"outrider/clients/go/outriderv1"
)

// Verification is a stream of trees that the caller drafts itself. One frame is under way at a time, each answered
// before the next; sequences may take turns. A refused frame is an error, and unless the engine failed its sequence
// stays open. Cancelling the context ends all of them.
type Verification struct {
	stream outriderv1.TargetService_VerifyClient
}

// Verification opens a stream.
func (c *Client) Verification(ctx context.Context) (*Verification, error) {
	stream, err := c.Target.Verify(ctx)
	if err != nil {
		return nil, err
	}
	return &Verification{stream}, nil
}

// Open starts a sequence; its last token is the root of the first tree.
func (v *Verification) Open(sequence *outriderv1.OpenVerification) (*outriderv1.VerificationOpened, error) {
	answer, err := v.ask(&outriderv1.VerifyRequest{Frame: &outriderv1.VerifyRequest_Open{Open: sequence}})
	if err != nil {
		return nil, err
	}
	if answer.GetOpened() == nil {
		return nil, fmt.Errorf("expected opened, got %T", answer.Frame)
	}
	return answer.GetOpened(), nil
}

// Verify runs one step: what the target commits of a tree, and its own next token.
func (v *Verification) Verify(tree *outriderv1.VerifyTree) (*outriderv1.Verdict, error) {
	answer, err := v.ask(&outriderv1.VerifyRequest{Frame: &outriderv1.VerifyRequest_Tree{Tree: tree}})
	if err != nil {
		return nil, err
	}
	if answer.GetVerdict() == nil {
		return nil, fmt.Errorf("expected a verdict, got %T", answer.Frame)
	}
	return answer.GetVerdict(), nil
}

// Close ends a sequence and frees what it holds.
func (v *Verification) Close(sequenceID uint64) error {
	frame := &outriderv1.CloseVerification{SequenceId: sequenceID}
	return v.stream.Send(&outriderv1.VerifyRequest{Frame: &outriderv1.VerifyRequest_Close{Close: frame}})
}

// End half-closes the stream and waits until the service has ended it too.
func (v *Verification) End() error {
	if err := v.stream.CloseSend(); err != nil {
		return err
	}
	for {
		if _, err := v.stream.Recv(); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
	}
}

func (v *Verification) ask(frame *outriderv1.VerifyRequest) (*outriderv1.VerifyResponse, error) {
	// A stream that has ended says why in Recv, and only io.EOF in Send.
	if err := v.stream.Send(frame); err != nil && err != io.EOF {
		return nil, err
	}
	answer, err := v.stream.Recv()
	if err != nil {
		return nil, err
	}
	if refused := answer.GetStatus(); refused != nil {
		return nil, errorOfStatus(refused.Status)
	}
	return answer, nil
}
