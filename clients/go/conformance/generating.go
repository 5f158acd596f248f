package main

import (
	"context"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	outrider "outrider/clients/go"
	"outrider/clients/go/outriderv1"
)

type answer struct {
	TokenIDs         []uint32                `json:"tokenIds"`
	Text             string                  `json:"text"`
	Seed             string                  `json:"seed"`
	Drafted          uint32                  `json:"drafted"`
	FinishReason     outriderv1.FinishReason `json:"finishReason"`
	CompletionTokens uint32                  `json:"completionTokens"`
	Steps            uint64                  `json:"steps"`
	DraftRefused     outrider.Reason         `json:"draftRefused"`
}

func ask(ctx context.Context, in *Input, pause time.Duration) (*answer, error) {
	client, said := in.client(), &answer{}
	defer client.Close()
	var trailer metadata.MD
	err := client.Generate(ctx, in.request(), func(response *outriderv1.GenerateResponse) error {
		time.Sleep(pause)
		switch event := response.Event.(type) {
		case *outriderv1.GenerateResponse_Started:
			said.Seed = strconv.FormatUint(event.Started.Seed, 10)
		case *outriderv1.GenerateResponse_Chunk:
			said.TokenIDs = append(said.TokenIDs, event.Chunk.TokenIds...)
			said.Text += event.Chunk.Text
			said.Drafted += event.Chunk.DraftedTokens
		case *outriderv1.GenerateResponse_Finished:
			said.FinishReason = event.Finished.FinishReason
			said.CompletionTokens = event.Finished.GetUsage().GetCompletionTokens()
			said.Steps = event.Finished.GetSpeculation().GetSteps()
		}
		return nil
	}, grpc.Trailer(&trailer))
	said.DraftRefused = outrider.DraftRefused(trailer)
	return said, err
}

func generate(in *Input) any {
	said, err := ask(context.Background(), in, 0)
	must(err)
	return said
}

func slowConsumer(in *Input) any {
	said, err := ask(context.Background(), in, time.Duration(in.PauseMs)*time.Millisecond)
	must(err)
	return said
}

func concurrent(in *Input) any {
	outputs := make([][]uint32, in.Sequences)
	var group sync.WaitGroup
	for i := range outputs {
		group.Add(1)
		go func(i int) {
			defer group.Done()
			said, err := ask(context.Background(), in, 0)
			must(err)
			outputs[i] = said.TokenIDs
		}(i)
	}
	group.Wait()
	return outputs
}

func refused(in *Input) any {
	_, err := ask(context.Background(), in, 0)
	return failure(err)
}

func deadline(in *Input) any {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(in.TimeoutMs)*time.Millisecond)
	defer cancel()
	_, err := ask(ctx, in, 0)
	return failure(err)
}

func cancelAfterBegin(in *Input) any {
	client := in.client()
	defer client.Close()
	ctx, cancel := context.WithCancel(context.Background())
	stream, err := client.Target.Generate(ctx, in.request())
	must(err)
	cancel()
	_, err = stream.Recv()
	return failure(err)
}

func cancelAfterFirstResponse(in *Input) any {
	client := in.client()
	defer client.Close()
	ctx, cancel := context.WithCancel(context.Background())
	return failure(client.Generate(ctx, in.request(), func(*outriderv1.GenerateResponse) error {
		cancel()
		return nil
	}))
}

func chat(in *Input) any {
	client := in.client()
	defer client.Close()
	var text strings.Builder
	sampling := &outriderv1.SamplingParameters{MaxTokens: proto.Uint32(12)}
	must(client.Chat(context.Background(), outrider.User("hi"), sampling, func(chunk *outriderv1.GenerateChunk) error {
		_, err := text.WriteString(chunk.Text)
		return err
	}))
	return text.String()
}

func info(in *Input) any {
	client := in.client()
	defer client.Close()
	said, err := client.Target.GetTargetInfo(context.Background(), &outriderv1.GetTargetInfoRequest{})
	must(err)
	return map[string]any{
		"model": said.Model, "vocabularySize": said.VocabularySize, "dtype": said.Dtype, "drafter": said.Drafter,
	}
}

// How a call fails without a token, and with it.
func token(in *Input) any {
	client, ctx := in.client(), context.Background()
	defer client.Close()
	_, without := client.Target.GetTargetInfo(ctx, &outriderv1.GetTargetInfoRequest{})
	_, with := client.Target.GetTargetInfo(outrider.WithToken(ctx, in.Token), &outriderv1.GetTargetInfoRequest{})
	return []map[string]any{failure(without), failure(with)}
}

// The target does not serve the draft's methods.
func unimplemented(in *Input) any {
	client := in.client()
	defer client.Close()
	_, err := client.Draft.GetDraftInfo(context.Background(), &outriderv1.GetDraftInfoRequest{})
	return failure(err)
}
