package outrider

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Reason is the stable name of what went wrong. It is an error, so that errors.Is(err, outrider.QuotaExceeded) tells.
type Reason string

// What services report, and below what the client itself finds.
const (
	InvalidField       Reason = "INVALID_FIELD"
	PositionOutOfRange Reason = "POSITION_OUT_OF_RANGE"
	UnknownModel       Reason = "UNKNOWN_MODEL"
	UnknownSequence    Reason = "UNKNOWN_SEQUENCE"
	UnknownCorpus      Reason = "UNKNOWN_CORPUS"
	SequenceExists     Reason = "SEQUENCE_EXISTS"
	StepReplayed       Reason = "STEP_REPLAYED"
	StepSkipped        Reason = "STEP_SKIPPED"
	WrongRoot          Reason = "WRONG_ROOT"
	WrongVocabulary    Reason = "WRONG_VOCABULARY"
	NotSupported       Reason = "NOT_SUPPORTED"
	QuotaExceeded      Reason = "QUOTA_EXCEEDED"
	CreditExceeded     Reason = "CREDIT_EXCEEDED"
	Unauthenticated    Reason = "UNAUTHENTICATED"
	PermissionDenied   Reason = "PERMISSION_DENIED"
	DeadlineExceeded   Reason = "DEADLINE_EXCEEDED"
	Draining           Reason = "DRAINING"
	WeightsChanged     Reason = "WEIGHTS_CHANGED"
	DraftUnavailable   Reason = "DRAFT_UNAVAILABLE"
	EngineDead         Reason = "ENGINE_DEAD"
	LogitsNotFinite    Reason = "LOGITS_NOT_FINITE"
	Loading            Reason = "LOADING"

	// Unreachable: nobody answers at the address, or the connection broke.
	Unreachable Reason = "UNREACHABLE"
	// Cancelled: the caller's context was cancelled.
	Cancelled Reason = "CANCELLED"
)

func (r Reason) Error() string { return string(r) }

// Field is a field at fault, by path, such as tree.parents[3].
type Field struct{ Path, Description string }

// Error is how a call or a frame of a stream failed. Every method of this package, and of the generated clients that a
// Client holds, returns it; find it with errors.As or ErrorOf, and tell it apart with errors.Is and a Reason.
type Error struct {
	Code    codes.Code
	Message string
	// Reason is empty for an error that neither an Outrider service nor this client explains.
	Reason   Reason
	Metadata map[string]string
	Fields   []Field
	// RetryAfter says when trying again makes sense; 0 when the service does not ask for it.
	RetryAfter time.Duration
	// Address is the service's, where a call to it failed.
	Address string
}

func (e *Error) Error() string {
	switch {
	case e.Reason == Unreachable:
		return fmt.Sprintf("cannot reach %s: %s", e.Address, e.Message)
	case e.Reason != "":
		return fmt.Sprintf("%s: %s", e.Reason, e.Message)
	}
	return fmt.Sprintf("%s: %s", e.Code, e.Message)
}

// Is tells whether the target is this error's Reason, or the context's error of the same meaning.
func (e *Error) Is(target error) bool {
	switch target {
	case context.Canceled:
		return e.Code == codes.Canceled
	case context.DeadlineExceeded:
		return e.Code == codes.DeadlineExceeded
	}
	reason, ok := target.(Reason)
	return ok && reason == e.Reason
}

// GRPCStatus lets status.Code and status.FromError read the error.
func (e *Error) GRPCStatus() *status.Status { return status.New(e.Code, e.Message) }

// ErrorOf reads the details of any error that a call returns; nil for nil.
func ErrorOf(err error) *Error { return errorOf(err, "") }

func errorOf(err error, address string) *Error {
	if err == nil {
		return nil
	}
	var known *Error
	if errors.As(err, &known) {
		return known
	}
	s := status.Convert(err)
	found := &Error{Code: s.Code(), Message: s.Message(), Address: address}
	for _, detail := range s.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			found.Reason, found.Metadata = Reason(detail.Reason), detail.Metadata
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				found.Fields = append(found.Fields, Field{violation.Field, violation.Description})
			}
		case *errdetails.RetryInfo:
			found.RetryAfter = detail.GetRetryDelay().AsDuration()
		}
	}
	if found.Reason == "" {
		found.explain()
	}
	return found
}

// transportErrors are what Go and gRPC say of a connection that cannot be, and what it means. The others are shown as they
// are. A server that asks for a client's certificate hangs up after the handshake, which is seen as one of several.
var transportErrors = []struct{ said, meaning string }{
	{"first record does not look like a TLS handshake", "it does not speak TLS"},
	{"looked like an HTTP/1.1 header", "it speaks HTTP/1 and no gRPC, as a gateway does"},
	{"error reading server preface: EOF", "it hung up at once, as a server does that expects TLS, or a client's certificate"},
	{"tls: certificate required", "it asks for a client's certificate"},
}

// explain names what gRPC reports itself: no service's details come with it.
func (e *Error) explain() {
	switch e.Code {
	case codes.Unavailable:
		e.Reason = Unreachable
		// gRPC wraps what the system said in its own words.
		_, said, wrapped := strings.Cut(e.Message, `desc = "`)
		if wrapped {
			e.Message = strings.TrimSuffix(said, `"`)
		}
		for _, layer := range []string{"transport: ", "Error while dialing: "} {
			e.Message = strings.TrimPrefix(e.Message, layer)
		}
		for _, known := range transportErrors {
			if strings.Contains(e.Message, known.said) {
				e.Message = known.meaning
				break
			}
		}
	case codes.DeadlineExceeded:
		e.Reason, e.Message = DeadlineExceeded, "the deadline passed before the answer was complete"
	case codes.Canceled:
		e.Reason = Cancelled
	}
}

// errorOfStatus is the error of one frame of a stream, which travels as a message.
func errorOfStatus(s *rpcstatus.Status) error { return errorOf(status.ErrorProto(s), "") }
