package outrider

import (
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Field is a field at fault, by path, such as tree.parents[3].
type Field struct{ Path, Description string }

// Problem is what a service says about a call or frame that it refused.
type Problem struct {
	Code    codes.Code
	Message string
	// Reason is a stable name such as INVALID_FIELD; empty when the error did not come from an Outrider service.
	Reason   string
	Metadata map[string]string
	Fields   []Field
	// RetryAfter says in nanoseconds when trying again makes sense; 0 when it does not.
	RetryAfter int64
}

// ProblemOf reads the details of any error that a call returns.
func ProblemOf(err error) Problem {
	s := status.Convert(err)
	problem := Problem{Code: s.Code(), Message: s.Message()}
	for _, detail := range s.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			problem.Reason, problem.Metadata = detail.Reason, detail.Metadata
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				problem.Fields = append(problem.Fields, Field{violation.Field, violation.Description})
			}
		case *errdetails.RetryInfo:
			delay := detail.GetRetryDelay()
			problem.RetryAfter = delay.GetSeconds()*1e9 + int64(delay.GetNanos())
		}
	}
	return problem
}

// errorOfStatus is the error of one frame of a stream, which travels as a message.
func errorOfStatus(s *rpcstatus.Status) error { return status.ErrorProto(s) }
