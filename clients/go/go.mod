module outrider/clients/go

go 1.19

// What Debian 12 packages, and the oldest that the SDK is tested with; `go mod tidy` adds the rest.
require (
	google.golang.org/grpc v1.33.3
	google.golang.org/protobuf v1.28.1
)
