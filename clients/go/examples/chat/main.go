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
	client, err := outrider.Dial(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	question := outrider.User("Why is the sky blue?")
	err = client.Chat(context.Background(), question, nil, func(chunk *outriderv1.GenerateChunk) error {
		_, err := fmt.Print(chunk.Text)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
}
