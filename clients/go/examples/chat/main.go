// Command chat streams the answer to one question.
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	outrider "outrider/clients/go"
	"outrider/clients/go/outriderv1"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: chat ADDRESS QUESTION")
		os.Exit(2)
	}
	client, err := outrider.Dial(os.Args[1], outrider.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	question := outrider.User(os.Args[2])
	err = client.Chat(context.Background(), question, nil, func(chunk *outriderv1.GenerateChunk) error {
		_, err := fmt.Print(chunk.Text)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println()
}
