// Package outrider is the Go SDK of Outrider: streams of generated text, and verification of trees that the caller
// drafts itself. Package outriderv1 holds the generated contract.
package outrider

//go:generate buf generate ../.. --template buf.gen.yaml --path ../../protos/outrider
