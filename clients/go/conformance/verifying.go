package main

import (
	"context"

	"google.golang.org/protobuf/proto"

	outrider "outrider/clients/go"
	"outrider/clients/go/outriderv1"
)

const (
	depth = 4
	// Every fifth guess is wrong, so that verdicts of every length occur.
	mistakeEvery = 5
)

// guessTree is a branch that follows the known answer, with mistakes, beside a branch that does not.
func guessTree(root uint32, expected []uint32, done int) *outriderv1.TokenTree {
	tree := &outriderv1.TokenTree{TokenIds: []uint32{root}, Parents: []uint32{0}}
	for i := done; i < len(expected) && i < done+depth; i++ {
		token := expected[i]
		if i%mistakeEvery == mistakeEvery-1 {
			token ^= 1
		}
		tree.Parents = append(tree.Parents, uint32(i-done))
		tree.TokenIds = append(tree.TokenIds, token)
	}
	if len(tree.TokenIds) > 1 {
		first := tree.TokenIds[1]
		tree.Parents = append(tree.Parents, 0, uint32(len(tree.TokenIds)))
		tree.TokenIds = append(tree.TokenIds, first^2, first)
	}
	return tree
}

func open(client *outrider.Client) *outrider.Verification {
	verification, err := client.Verification(context.Background())
	must(err)
	return verification
}

func verify(in *Input) any {
	client, request := in.client(), in.request()
	defer client.Close()
	prompt := request.GetTokens().TokenIds
	verification := open(client)
	opened, err := verification.Open(&outriderv1.OpenVerification{TokenIds: prompt, Sampling: request.Sampling})
	must(err)
	output, accepted, steps := []uint32{}, 0, 0
	root, step, reason := prompt[len(prompt)-1], opened.Step, outriderv1.FinishReason(0)
	for reason == outriderv1.FinishReason_FINISH_REASON_UNSPECIFIED {
		tree := guessTree(root, in.Expected, len(output))
		verdict, err := verification.Verify(&outriderv1.VerifyTree{SequenceId: opened.SequenceId, Step: step, Tree: tree})
		must(err)
		output = append(output, verdict.TokenIds...)
		accepted += len(verdict.AcceptedRows)
		root, step, reason = output[len(output)-1], verdict.NextStep, verdict.FinishReason
		steps++
	}
	must(verification.End())
	return map[string]any{"tokenIds": output, "accepted": accepted, "steps": steps, "finishReason": reason}
}

// pingPong lets sequences take turns on one stream, one token each time.
func pingPong(in *Input) any {
	client, request := in.client(), in.request()
	defer client.Close()
	verification := open(client)
	opened := make([]*outriderv1.VerificationOpened, in.Sequences)
	outputs, roots, steps := make([][]uint32, in.Sequences), make([]uint32, in.Sequences), make([]uint64, in.Sequences)
	for i := range opened {
		roots[i] = uint32(3 + i)
		prompt := append(append([]uint32{}, request.GetTokens().TokenIds...), roots[i])
		var err error
		opened[i], err = verification.Open(&outriderv1.OpenVerification{TokenIds: prompt, Sampling: request.Sampling})
		must(err)
		steps[i] = opened[i].Step
	}
	for turn := uint32(0); turn < request.Sampling.GetMaxTokens(); turn++ {
		for i := range opened {
			tree := &outriderv1.TokenTree{TokenIds: []uint32{roots[i]}, Parents: []uint32{0}}
			verdict, err := verification.Verify(
				&outriderv1.VerifyTree{SequenceId: opened[i].SequenceId, Step: steps[i], Tree: tree})
			must(err)
			outputs[i] = append(outputs[i], verdict.TokenIds...)
			roots[i], steps[i] = verdict.TokenIds[len(verdict.TokenIds)-1], verdict.NextStep
		}
	}
	must(verification.End())
	return outputs
}

// refusedTree: a malformed tree is refused with its field, and the sequence goes on.
func refusedTree(in *Input) any {
	client := in.client()
	defer client.Close()
	verification := open(client)
	sampling := &outriderv1.SamplingParameters{MaxTokens: proto.Uint32(8), IgnoreEos: true}
	opened, err := verification.Open(&outriderv1.OpenVerification{TokenIds: []uint32{5}, Sampling: sampling})
	must(err)
	ask := func(tree *outriderv1.TokenTree) (*outriderv1.Verdict, error) {
		return verification.Verify(&outriderv1.VerifyTree{SequenceId: opened.SequenceId, Step: opened.Step, Tree: tree})
	}
	_, err = ask(&outriderv1.TokenTree{TokenIds: []uint32{5, 6, 7}, Parents: []uint32{0, 2, 0}})
	problem := failure(err)
	verdict, err := ask(&outriderv1.TokenTree{TokenIds: []uint32{5}, Parents: []uint32{0}})
	must(err)
	must(verification.Close(opened.SequenceId))
	must(verification.End())
	problem["recovered"] = len(verdict.TokenIds)
	return problem
}

// emptyStream: a stream that says nothing ends cleanly.
func emptyStream(in *Input) any {
	client := in.client()
	defer client.Close()
	must(open(client).End())
	return "ended"
}
