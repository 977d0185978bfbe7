// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"maps"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseQueues(t *testing.T) {
	for text, want := range map[string]queueValues{
		"": {}, "0=3 7=80": {0: "3", 7: "80"}, "1023=ff,ffffffff": {1023: "ff,ffffffff"},
	} {
		got, err := parseQueues(text)
		if err != nil || !maps.Equal(got, want) || got.String() != text {
			t.Errorf("%q: %v, %v, want %v", text, got, err, want)
		}
	}
	for _, text := range []string{"x", "0", "0=", "-1=3", "1024=3", "01=3", "0=3,1=4x 2"} {
		if got, err := parseQueues(text); err == nil {
			t.Errorf("%q is read as %v", text, got)
		}
	}
}

func TestInstead(t *testing.T) {
	want, now := queueValues{0: "3", 1: "1"}, queueValues{1: "1", 0: "1", 5: "f"}
	if diff := cmp.Diff(queueValues{0: "3", 5: "0"}, want.instead(now, "0")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestCanonical(t *testing.T) {
	for text, want := range map[string]string{
		"0": "0", "00000000,00000000": "0", "00000000,0000000f": "f",
		"00000001,00000000": "1,00000000", "1000": "1000", "": "",
	} {
		if got := canonical(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

func FuzzParseQueues(f *testing.F) {
	for _, seed := range []string{
		"", "0=3 7=80", "1023=ff,ffffffff", "0==", "5 5=5", "9999999999999999999=1",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		values, err := parseQueues(text)
		if err != nil {
			return
		}

		for queue := range values {
			if queue < 0 || queue >= maxQueues {
				t.Errorf("%q has queue %s", text, strconv.Itoa(queue))
			}
		}

		if again, err := parseQueues(values.String()); err != nil || !maps.Equal(again, values) {
			t.Errorf("%q is %v, and then %v, %v", text, values, again, err)
		}
	})
}
