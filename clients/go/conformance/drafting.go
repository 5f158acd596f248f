package main

import (
	"context"
	"io"
	"log"

	outrider "outrider/clients/go"
	"outrider/clients/go/outriderv1"
)

var document = []uint32{10, 11, 12, 13, 14, 15}

// draft speaks to the draft service as a target does: teaches it a document and asks how it goes on.
func draft(in *Input) any {
	client, err := outrider.Dial(in.Draft, outrider.Options{})
	must(err)
	defer client.Close()
	ctx := context.Background()
	info, err := client.Draft.GetDraftInfo(ctx, &outriderv1.GetDraftInfoRequest{})
	must(err)
	teaching, err := client.Draft.AddCorpus(ctx)
	must(err)
	must(teaching.Send(&outriderv1.AddCorpusRequest{Corpus: "letters-go", TokenIds: document}))
	must(teaching.Send(&outriderv1.AddCorpusRequest{TokenIds: document}))
	taught, err := teaching.CloseAndRecv()
	must(err)
	first, second := propose(ctx, client)
	return map[string]any{
		"drafter": info.Drafter, "tokens": taught.Tokens, "growth": [][]uint32{first, second},
	}
}

func propose(ctx context.Context, client *outrider.Client) (first, second []uint32) {
	stream, err := client.Draft.Propose(ctx)
	must(err)
	send := func(request *outriderv1.ProposeRequest) { must(stream.Send(request)) }
	send(&outriderv1.ProposeRequest{Frame: &outriderv1.ProposeRequest_Credit{Credit: &outriderv1.Credit{Frames: 16}}})
	send(&outriderv1.ProposeRequest{Frame: &outriderv1.ProposeRequest_Open{Open: &outriderv1.OpenSequence{
		SequenceId: 1, TokenIds: document[:2], PromptLength: 2, VocabularySize: 211, Corpus: "letters-go", Tenant: "sdk",
	}}})
	first = growth(stream)
	advance := &outriderv1.SequenceAdvance{SequenceId: 1, Step: 1, TokenIds: []uint32{12}}
	send(&outriderv1.ProposeRequest{Frame: &outriderv1.ProposeRequest_Advance{
		Advance: &outriderv1.AdvanceSequences{Sequences: []*outriderv1.SequenceAdvance{advance}}}})
	second = growth(stream)
	send(&outriderv1.ProposeRequest{Frame: &outriderv1.ProposeRequest_Close{
		Close: &outriderv1.CloseSequences{SequenceIds: []uint64{1}}}})
	must(stream.CloseSend())
	for err == nil {
		_, err = stream.Recv()
	}
	if err != io.EOF {
		log.Fatal(err)
	}
	return first, second
}

func growth(stream outriderv1.DraftService_ProposeClient) []uint32 {
	for {
		answer, err := stream.Recv()
		must(err)
		if refused := answer.GetStatus(); refused != nil {
			log.Fatal(refused.Status)
		}
		if grown := answer.GetGrowth(); grown != nil {
			tokens := []uint32{}
			for _, sequence := range grown.Sequences {
				tokens = append(tokens, sequence.TokenIds...)
			}
			return tokens
		}
	}
}
