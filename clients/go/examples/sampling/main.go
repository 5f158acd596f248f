// Command sampling draws an answer with a seed, and draws it again: the same seed gives the same tokens.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"

	outrider "outrider/clients/go"
	"outrider/clients/go/outriderv1"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) != 4 {
		usage()
	}
	seed, err := strconv.ParseUint(os.Args[2], 10, 64)
	if err != nil {
		usage()
	}
	client, err := outrider.Dial(os.Args[1], outrider.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	sampling := &outriderv1.SamplingParameters{
		Temperature: 0.8,
		TopP:        proto.Float64(0.9),
		Seed:        proto.Uint64(seed),
		MaxTokens:   proto.Uint32(64),
	}
	first, second := draw(client, os.Args[3], sampling), draw(client, os.Args[3], sampling)
	fmt.Println(first)
	fmt.Printf("drawn twice, the same: %t\n", first == second)
}

func draw(client *outrider.Client, question string, sampling *outriderv1.SamplingParameters) string {
	var text strings.Builder
	err := client.Chat(context.Background(), outrider.User(question), sampling, func(chunk *outriderv1.GenerateChunk) error {
		_, err := text.WriteString(chunk.Text)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	return text.String()
}

func usage() {
	fmt.Fprintln(os.Stderr, "usage: sampling ADDRESS SEED QUESTION")
	os.Exit(2)
}
