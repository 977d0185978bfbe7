// SPDX-License-Identifier: Apache-2.0

package nodestate

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestDecodeRefuses checks that an invalid state is not taken for an empty one.
func TestDecodeRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"":                                "is no state of a node",
		"null":                            "it is null",
		`["a"]`:                           "is no state of a node",
		`{"functions": 7}`:                "is no state of a node",
		strings.Repeat(" ", MaxMessage+1): "is longer than",
	} {
		state, err := Decode([]byte(text))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.20q is %v, %v, want an error with %q", text, state, err, want)
		}
	}
}

// FuzzDecode checks that an agent's answer is rejected, or decodes to a State that stays the same
// when encoded and decoded again.
func FuzzDecode(f *testing.F) {
	full, err := json.Marshal(State{
		Node: "node1", Time: time.Unix(1, 0).UTC(),
		DeadLetters: []DeadLetter{{Hook: PortHook, Error: "gone"}},
		Functions: []Function{{Netdev: "eth1", Attachment: &Attachment{
			State: "Attached", Pod: Pod{Namespace: "a", Name: "b"}, Hook: &Hook{Name: PortHook},
			Quarantine: &Quarantine{Reason: "MayLeak"},
		}}},
	})

	must.Succeed(f, err)
	for _, text := range []string{string(full), `{}`, `null`,
		`{"functions": [{"function": "0000:3b:00.2/sf88", "pf": "x"}]}`,
		`{"functions": [{"attachment": {"interface": {"mac": "", "addresses": ["10.0.0.1/33"]}}}], "unknown": 1}`,
	} {
		f.Add([]byte(text))
	}

	f.Fuzz(func(t *testing.T, answer []byte) {
		state, err := Decode(answer)
		if (state == nil) != (err != nil) {
			t.Fatalf("%v, %v", state, err)
		}
		if err != nil {
			return
		}

		written, err := json.Marshal(state)
		if err != nil {
			return // an ID or time that cannot be encoded
		}

		read, err := Decode(written)
		must.Succeed(t, err)
		again, err := json.Marshal(read)
		must.Succeed(t, err)
		if !bytes.Equal(written, again) {
			t.Errorf("%s is read as %s", written, again)
		}
	})
}
