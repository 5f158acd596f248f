// One conformance case per run: conformance CASE, its input on standard input and its result on standard output, in
// JSON. The tests in tests/sdk run it against real services; the TypeScript program beside it answers the same cases.
package main

import (
	"encoding/json"
	"errors"
	"log"
	"os"

	"google.golang.org/protobuf/encoding/protojson"

	outrider "outrider/clients/go"
	"outrider/clients/go/outriderv1"
)

// Input is what the tests write; which fields are set depends on the case.
type Input struct {
	Target string
	Draft  string
	// Request is a GenerateRequest in protobuf's JSON.
	Request json.RawMessage
	// Expected is the answer that the client's drafts are made from.
	Expected  []uint32
	Sequences int
	PauseMs   int64
	TimeoutMs int64
	Token     string
	Attempts  int
	// TLS, checked against the authority in CA; Certificate and Key are the client's own.
	TLS                              bool
	CA, Certificate, Key, ServerName string
	Words                            []struct {
		Seed     uint64   `json:",string"`
		Position uint64   `json:",string"`
		TokenIDs []uint32 `json:"token_ids"`
	}
	Races []struct {
		Seed     uint64 `json:",string"`
		Position uint64 `json:",string"`
		Weights  []float64
	}
}

func (in *Input) request() *outriderv1.GenerateRequest {
	request := &outriderv1.GenerateRequest{}
	must(protojson.Unmarshal(in.Request, request))
	return request
}

func (in *Input) client() *outrider.Client {
	client, err := outrider.Dial(in.Target, outrider.Options{})
	must(err)
	return client
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// failure is how a call fails, as the tests compare it.
func failure(err error) map[string]any {
	problem := outrider.ErrorOf(err)
	fields := []string{}
	for _, field := range problem.Fields {
		fields = append(fields, field.Path)
	}
	return map[string]any{
		"code": problem.Code, "message": problem.Message, "reason": problem.Reason, "fields": fields,
		"line": err.Error(), "is": errors.Is(err, problem.Reason),
	}
}

func noise(in *Input) any {
	words, exponentials, winners := [][]uint32{}, [][]float64{}, []int{}
	for _, vector := range in.Words {
		drawn, times := []uint32{}, []float64{}
		for _, token := range vector.TokenIDs {
			word := outrider.NoiseWord(vector.Seed, vector.Position, token)
			drawn, times = append(drawn, word), append(times, outrider.Exponential(word))
		}
		words, exponentials = append(words, drawn), append(exponentials, times)
	}
	for _, race := range in.Races {
		winners = append(winners, outrider.RaceWinner(race.Seed, race.Position, race.Weights))
	}
	return map[string]any{"words": words, "exponentials": exponentials, "winners": winners}
}

var cases = map[string]func(*Input) any{
	"noise":                    noise,
	"info":                     info,
	"generate":                 generate,
	"chat":                     chat,
	"slowConsumer":             slowConsumer,
	"concurrent":               concurrent,
	"refused":                  refused,
	"deadline":                 deadline,
	"cancelAfterBegin":         cancelAfterBegin,
	"cancelAfterFirstResponse": cancelAfterFirstResponse,
	"unimplemented":            unimplemented,
	"token":                    token,
	"verify":                   verify,
	"pingPong":                 pingPong,
	"refusedTree":              refusedTree,
	"emptyStream":              emptyStream,
	"draft":                    draft,
	"call":                     call,
	"stream":                   stream,
	"reasons":                  reasons,
}

func main() {
	run, ok := cases[os.Args[len(os.Args)-1]]
	if !ok {
		log.Fatalf("no case %q", os.Args[len(os.Args)-1])
	}
	in := &Input{}
	must(json.NewDecoder(os.Stdin).Decode(in))
	must(json.NewEncoder(os.Stdout).Encode(run(in)))
}
