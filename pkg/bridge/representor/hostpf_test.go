// SPDX-License-Identifier: Apache-2.0

package representor

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
)

func TestParseHostPF(t *testing.T) {
	tests := []struct {
		in   string
		want HostPF
		says string // of the error
	}{
		{
			in:   "0000:3b:00.0=c1pf0,offset=2,stride=1",
			want: HostPF{Address: "0000:3b:00.0", Name: "c1pf0", Offset: 2, Stride: 1},
		},
		{in: "0000:3B:00.1=pf1", want: HostPF{Address: "0000:3b:00.1", Name: "pf1"}},
		{
			in: "10000:3b:00.1=c0pf1,eswitch=0000:03:00.1,stride=2,offset=128",
			want: HostPF{Address: "10000:3b:00.1", Name: "c0pf1", Offset: 128, Stride: 2,
				Eswitch: "0000:03:00.1"},
		},
		{in: "0000:01:00.0=own", want: HostPF{Address: "0000:01:00.0"}},
		{in: "0000:01:00.0=own,offset=2,stride=1", says: "nothing may follow own"},
		{in: "own", says: `"own" is not the phys_port_name`},
		{in: "c1pf0,mac=02:00:00:00:00:0A", want: HostPF{Name: "c1pf0", MAC: "02:00:00:00:00:0a"}},
		{in: "pf0,serial=MT 2334", want: HostPF{Name: "pf0", Serial: "MT 2334"}},
		{in: "", says: `"" is not the phys_port_name`},
		{in: "=c1pf0", says: "dddd:bb:dd.f"},
		{in: "c1pf0,offset=2,stride=1", says: "need the PF's address"},
		{in: "c1pf0,mac=MT2334", says: `mac: MAC "MT2334"`},
		{in: "c1pf0,serial=", says: "printable ASCII"},
		{in: "c1pf0,serial= MT2334", says: "printable ASCII"},
		{in: "c1pf0,serial=\x01", says: "printable ASCII"},
		{in: "3b:00.0=c1pf0", says: "dddd:bb:dd.f"},
		{in: "0000:3b:00.0", says: `"0000:3b:00.0" is not the phys_port_name`},
		{in: "0000:3b:00.0=p0", says: `"p0" is not the phys_port_name`},
		{in: "0000:3b:00.0=c1pf0vf3", says: `"c1pf0vf3" is not the phys_port_name`},
		{in: "0000:3b:00.0=pf65536", says: `"pf65536" is not the phys_port_name`},
		{in: "0000:3b:00.0=c4294967296pf0", says: `"c4294967296pf0" is not the phys_port_name`},
		{in: "0000:3b:00.0=c1pf0,offset=2", says: "go together"},
		{in: "0000:3b:00.0=c1pf0,offset=2,stride=0", says: `stride: "0": must be 1-65535`},
		{in: "0000:3b:00.0=c1pf0,offset=65536,stride=1", says: "must be 1-65535"},
		{in: "0000:3b:00.0=c1pf0,offset=2,offset=2,stride=1", says: "offset is given twice"},
		{in: "0000:3b:00.0=c1pf0,vfs=8", says: "one of offset, stride, eswitch"},
		{in: "0000:3b:00.0=c1pf0,eswitch=p0", says: "eswitch: PCI address"},
		{in: "0000:3b:00.0=c1pf0,", says: `"" must be one of`},
	}
	for _, test := range tests {
		got, err := ParseHostPF(test.in)
		if diff := gocmp.Diff(test.want, got, gocmp.AllowUnexported(HostPF{})); diff != "" ||
			(err != nil) != (test.says != "") {
			t.Errorf("%q: %v (-want +got):\n%s", test.in, err, diff)
		}

		if err != nil &&
			(!strings.Contains(err.Error(), test.says) ||
				!strings.Contains(err.Error(), "must be like 0000:3b:00.0=c1pf0")) {
			t.Errorf("%q: %v, want it to say %q and what would be right", test.in, err, test.says)
		}
	}
}

func TestCheckHostPFs(t *testing.T) {
	tests := map[string]struct {
		pfs  []string
		says string // empty: they are right
	}{
		"two PFs of one card": {pfs: []string{"0000:3b:00.0=c1pf0", "0000:3b:00.1=c1pf1"}},
		"one address twice": {
			[]string{"0000:3b:00.0=c1pf0", "0000:3b:00.0=c1pf1"},
			"host PF 0000:3b:00.0 is given twice",
		},
		"one name twice": {
			[]string{"0000:3b:00.0=c1pf0", "0000:3b:00.1=c1pf0"},
			"0000:3b:00.0 and 0000:3b:00.1 are both c1pf0",
		},
		"one name at one of the eswitches": {
			[]string{"0000:3b:00.0=pf0,eswitch=0000:03:00.0", "0000:5e:00.0=pf0"}, "both pf0",
		},
		"one name at two eswitches": {
			pfs: []string{
				"0000:3b:00.0=pf0,eswitch=0000:03:00.0", "0000:5e:00.0=pf0,eswitch=0000:04:00.0",
			},
		},
		"PFs of this machine": {pfs: []string{"0000:01:00.0=own", "0000:01:00.1=own"}},
		"one of this machine twice": {
			[]string{"0000:01:00.0=own", "0000:01:00.0=own"}, "host PF 0000:01:00.0 is given twice",
		},
		"without addresses": {pfs: []string{"c1pf0", "c1pf1"}},
		"one name twice, without addresses": {
			[]string{"c1pf0", "c1pf0"}, "without address and without address are both c1pf0",
		},
		"one number, by different controllers": {
			pfs: []string{"0000:3b:00.0=c1pf0", "0000:5e:00.0=c2pf0"},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			var pfs []HostPF
			for _, s := range test.pfs {
				pf, err := ParseHostPF(s)
				if err != nil {
					t.Fatal(err)
				}
				pfs = append(pfs, pf)
			}

			err := checkHostPFs(pfs)
			if (err != nil) != (test.says != "") ||
				err != nil && !strings.Contains(err.Error(), test.says) {
				t.Errorf("%v, want %q", err, test.says)
			}
		})
	}
}

// textOf returns the text that ParseHostPF parses.
func textOf(p HostPF) string {
	s := p.Name
	if p.Address != "" {
		s = string(p.Address) + "=" + cmp.Or(p.Name, ownPF)
	}

	if p.Stride != 0 {
		s += fmt.Sprintf(",offset=%d,stride=%d", p.Offset, p.Stride)
	}

	if p.Eswitch != "" {
		s += ",eswitch=" + string(p.Eswitch)
	}

	if p.MAC != "" {
		s += ",mac=" + string(p.MAC)
	}

	if p.Serial != "" {
		s += ",serial=" + p.Serial
	}

	return s
}

func FuzzParseHostPF(f *testing.F) {
	f.Add("0000:3b:00.0=c1pf0,offset=2,stride=1")
	f.Add("0000:3b:00.1=pf1,eswitch=0000:03:00.1")
	f.Add("pf0")
	f.Add("0000:01:00.0=own")
	f.Add("0000:3b:00.0=c1pf0,mac=02:00:00:00:00:0A,serial=MT 2334=1")

	f.Fuzz(func(t *testing.T, s string) {
		p, err := ParseHostPF(s)
		if err != nil {
			return
		}
		again, err := ParseHostPF(textOf(p))
		if diff := gocmp.Diff(p, again, gocmp.AllowUnexported(HostPF{})); diff != "" || err != nil {
			t.Errorf("%q is %s, which is: %v (-want +got):\n%s", s, textOf(p), err, diff)
		}
	})
}

func TestReadHostPFs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "host-pfs")
	if all, err := ReadHostPFs(path); err != nil || len(all) > 0 {
		t.Errorf("without a file: %v, %v", all, err)
	}

	for text, want := range map[string]string{
		"# none\n\n": "[]",
		"c1pf0,serial=MT1 # the first\n c1pf1,serial=MT1\n": "c1pf0 MT1 c1pf1 MT1",
		"c1pf0\nnonsense=": "host-pfs:2",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}

		all, err := ReadHostPFs(path)
		got := fmt.Sprint(err)
		if err == nil {
			var words []string
			for _, pf := range all {
				words = append(words, pf.Name, pf.Serial)
			}
			if got = strings.Join(words, " "); len(all) == 0 {
				got = "[]"
			}
		}

		if !strings.Contains(got, want) {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}
