package bridge

import (
	"fmt"
	"testing"
)

// FuzzParseUplink: what is taken has VNIs that there are, and is the same in its own words.
func FuzzParseUplink(f *testing.F) {
	f.Add("p0")
	f.Add("p0=1-9999")
	f.Add("bond0.7=16777215-16777215")
	f.Fuzz(func(t *testing.T, text string) {
		u, err := ParseUplink(text)
		if err != nil {
			return
		}

		again := u.Name
		if u.Last != 0 {
			again = fmt.Sprintf("%s=%d-%d", u.Name, u.First, u.Last)
		}
		if got, err := ParseUplink(again); err != nil || got != u {
			t.Errorf("%q is %+v, whose text %q is %+v, %v", text, u, again, got, err)
		}
		if u.Name == "" || u.First > u.Last || u.Last > maxVNI {
			t.Errorf("%q is %+v", text, u)
		}
	})
}
