package outrider

import "math"

// The shared noise of COUPLED verification, as protos/outrider/noise.py defines it: a client that ranks its candidates
// by this race drafts toward the very token that the target will choose.
const (
	philoxM0     = 0xD2511F53
	philoxM1     = 0xCD9E8D57
	philoxW0     = 0x9E3779B9
	philoxW1     = 0xBB67AE85
	philoxRounds = 10
)

func philox(c [4]uint32, k0, k1 uint32) [4]uint32 {
	for round := 0; round < philoxRounds; round++ {
		p0, p1 := uint64(c[0])*philoxM0, uint64(c[2])*philoxM1
		c = [4]uint32{uint32(p1>>32) ^ c[1] ^ k0, uint32(p1), uint32(p0>>32) ^ c[3] ^ k1, uint32(p0)}
		k0 += philoxW0
		k1 += philoxW1
	}
	return c
}

// NoiseWord is the noise of one token at one absolute position of a request with this seed.
func NoiseWord(seed, position uint64, tokenID uint32) uint32 {
	counter := [4]uint32{tokenID >> 2, uint32(position), uint32(position >> 32), 0}
	return philox(counter, uint32(seed), uint32(seed>>32))[tokenID&3]
}

// Exponential of a noise word: strictly positive.
func Exponential(word uint32) float64 {
	return -math.Log1p(-(float64(word) + 0.5) * 0x1p-32)
}

// RaceWinner is the token that wins the race under these weights (a law up to a factor). Weight 0 never wins; the
// result is -1 when all are 0.
func RaceWinner(seed, position uint64, weights []float64) int {
	winner, best := -1, math.Inf(1)
	for token, weight := range weights {
		if time := Exponential(NoiseWord(seed, position, uint32(token))) / weight; time < best {
			winner, best = token, time
		}
	}
	return winner
}
