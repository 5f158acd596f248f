package outrider

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// Version of this client; services see it as its user agent.
const Version = "0.1.0"

const (
	// DefaultTimeout of calls with one answer.
	DefaultTimeout = 10 * time.Second
	// DefaultGenerateTimeout of a whole generation, waiting for its turn included.
	DefaultGenerateTimeout = 10 * time.Minute
	// DefaultAttempts to make one call, the first included.
	DefaultAttempts = 4

	maxReceiveBytes = 16 << 20
)

// TLS says how to check the service and who we are. All but ServerName are paths of PEM files.
type TLS struct {
	// CA that signed the service's certificate; empty trusts the system's.
	CA string
	// Certificate and Key are the client's own, for mutual TLS. Give both or none.
	Certificate, Key string
	// ServerName that the certificate must hold, where it differs from the address.
	ServerName string
}

// Options of a Client. The zero value speaks plain text, without a token, with the default deadlines and retries.
type Options struct {
	// Token is sent as a bearer token with every call.
	Token string
	// TLS is nil for plain text.
	TLS *TLS
	// Timeout is the deadline of calls with one answer whose context has none. 0: DefaultTimeout. Negative: none.
	Timeout time.Duration
	// GenerateTimeout is the same for generations. 0: DefaultGenerateTimeout. Negative: none.
	GenerateTimeout time.Duration
	// Attempts to make a call that the service asks to try again later. 0: DefaultAttempts. 1: no retries.
	Attempts int
	// Dial holds more options of gRPC. They come last and so win, credentials too.
	Dial []grpc.DialOption
}

func (o Options) withDefaults() Options {
	if o.Timeout == 0 {
		o.Timeout = DefaultTimeout
	}
	if o.GenerateTimeout == 0 {
		o.GenerateTimeout = DefaultGenerateTimeout
	}
	if o.Attempts == 0 {
		o.Attempts = DefaultAttempts
	}
	return o
}

func (c *calls) connect() (*grpc.ClientConn, error) {
	if err := checkAddress(c.address); err != nil {
		return nil, err
	}
	secure := insecure.NewCredentials()
	if c.options.TLS != nil {
		var err error
		if secure, err = c.options.TLS.credentials(); err != nil {
			return nil, err
		}
	}
	dial := []grpc.DialOption{
		grpc.WithTransportCredentials(secure),
		grpc.WithUserAgent("outrider-go/" + Version),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxReceiveBytes)),
		grpc.WithChainUnaryInterceptor(c.unary),
		grpc.WithChainStreamInterceptor(c.stream),
	}
	return grpc.NewClient(c.address, append(dial, c.options.Dial...)...)
}

// checkAddress refuses what gRPC would try to resolve until the deadline.
func checkAddress(address string) error {
	if path, isUnix := strings.CutPrefix(address, "unix:"); isUnix && path != "" {
		return nil
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil || host == "" || port == "" || strings.Contains(host, "/") {
		return fmt.Errorf("address %q: expected HOST:PORT or unix:PATH", address)
	}
	return nil
}

func (t *TLS) credentials() (credentials.TransportCredentials, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: t.ServerName}
	if t.CA != "" {
		pem, err := os.ReadFile(t.CA)
		if err != nil {
			return nil, fmt.Errorf("TLS CA: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("TLS CA: %s holds no PEM certificate", t.CA)
		}
	}
	if (t.Certificate == "") != (t.Key == "") {
		return nil, fmt.Errorf("TLS: a certificate needs its key, and a key its certificate")
	}
	if t.Certificate != "" {
		pair, err := tls.LoadX509KeyPair(t.Certificate, t.Key)
		if err != nil {
			return nil, fmt.Errorf("TLS certificate: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return credentials.NewTLS(config), nil
}
