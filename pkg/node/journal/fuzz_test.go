// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"encoding/json"
	"reflect"
	"testing"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
)

// A record that decode accepts can be written and read again, and is the same then.
func FuzzDecode(f *testing.F) {
	vf := function.ID{Address: "0000:3b:02.1"}
	for _, a := range []Attachment{
		{Function: vf, State: Reserved},
		{Function: vf, State: Attached, Before: &netdev.Snapshot{
			Name: "a", MAC: "02:00:00:00:00:01", VF: &netdev.VFState{Trust: new(true)},
		}, Observed: &netdev.Observed{}},
		{Function: vf, State: Releasing, RestoredAt: time.Unix(1e9, 0).UTC(),
			Hooks: &Hooks{Done: []string{"port"}, Next: "a", Attempts: 2, Error: "e"},
			Ended: &Ended{Sandbox: "s"}},
		{Function: function.SubfunctionID("0000:3b:00.0", 1), State: Attaching,
			Before: &netdev.Snapshot{}},
	} {
		value, err := json.Marshal(a)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(a.Function.String(), value)
	}

	f.Add("0000:3b:02.1",
		[]byte(`{"function":"0000:3b:02.1","state":"Reserved","interface":{"mac":"zz"}}`))

	f.Fuzz(func(t *testing.T, key string, value []byte) {
		a, err := decode([]byte(key), value)
		if err != nil {
			return
		}

		again, err := json.Marshal(a)
		if err != nil {
			t.Fatalf("accepted, but cannot be written: %v", err)
		}

		b, err := decode([]byte(key), again)
		if err != nil {
			t.Fatalf("not accepted again: %v\n%s", err, again)
		}

		third, err := json.Marshal(b)
		if err != nil || !reflect.DeepEqual(again, third) {
			t.Fatalf("is not the same again: %v\n%s\n%s", err, again, third)
		}
	})
}

// A dead letter that is accepted can be written and read again, and is the same then.
func FuzzDecodeLetter(f *testing.F) {
	key := []byte("12345678")
	f.Add(key,
		[]byte(
			`{"hook":"10-a","attachment":{"function":"0000:3b:02.1","state":"Releasing","restoredAt":"2001-09-09T01:46:40Z"},"attempts":3}`,
		))

	f.Fuzz(func(t *testing.T, key, value []byte) {
		letter, err := decodeLetter(key, value)
		if err != nil {
			return
		}

		again, err := json.Marshal(letter)
		if err != nil {
			t.Fatalf("accepted, but cannot be written: %v", err)
		}

		second, err := decodeLetter(key, again)
		if err != nil {
			t.Fatalf("not accepted again: %v\n%s", err, again)
		}
		if third, err := json.Marshal(second); err != nil || !reflect.DeepEqual(again, third) {
			t.Fatalf("is not the same again: %v\n%s\n%s", err, again, third)
		}
	})
}
