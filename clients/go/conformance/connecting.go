package main

import (
	"context"
	"time"

	"google.golang.org/grpc"

	outrider "outrider/clients/go"
	"outrider/clients/go/outriderv1"
)

// options are the client's as the input sets them, with an option of gRPC's own that must leave plain text as it is.
func (in *Input) options() outrider.Options {
	options := outrider.Options{
		Token:    in.Token,
		Attempts: in.Attempts,
		Timeout:  time.Duration(in.TimeoutMs) * time.Millisecond,
		Dial:     []grpc.DialOption{grpc.WithIdleTimeout(time.Minute)},
	}
	options.GenerateTimeout = options.Timeout
	if in.TLS {
		options.TLS = &outrider.TLS{CA: in.CA, Certificate: in.Certificate, Key: in.Key, ServerName: in.ServerName}
	}
	return options
}

// call makes a call with one answer, with the input's options.
func call(in *Input) any {
	client, err := outrider.Dial(in.Target, in.options())
	if err != nil {
		return map[string]any{"refused": err.Error()}
	}
	defer client.Close()
	said, err := client.Target.GetTargetInfo(context.Background(), &outriderv1.GetTargetInfoRequest{})
	if err != nil {
		return failure(err)
	}
	return map[string]any{"model": said.Model}
}

// stream generates with the input's options.
func stream(in *Input) any {
	client, err := outrider.Dial(in.Target, in.options())
	must(err)
	defer client.Close()
	text := ""
	err = client.Chat(context.Background(), outrider.User("hi"), nil, func(chunk *outriderv1.GenerateChunk) error {
		text += chunk.Text
		return nil
	})
	if err != nil {
		return failure(err)
	}
	return map[string]any{"text": text}
}

// reasons that the client knows by name.
func reasons(*Input) any {
	return []outrider.Reason{
		outrider.InvalidField, outrider.PositionOutOfRange, outrider.UnknownModel, outrider.UnknownSequence,
		outrider.UnknownCorpus, outrider.SequenceExists, outrider.StepReplayed, outrider.StepSkipped,
		outrider.WrongRoot, outrider.WrongVocabulary, outrider.NotSupported, outrider.QuotaExceeded,
		outrider.CreditExceeded, outrider.Unauthenticated, outrider.PermissionDenied, outrider.DeadlineExceeded,
		outrider.Draining, outrider.WeightsChanged, outrider.DraftUnavailable, outrider.EngineDead,
		outrider.LogitsNotFinite, outrider.Loading,
	}
}
