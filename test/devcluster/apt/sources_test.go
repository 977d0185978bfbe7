// SPDX-License-Identifier: Apache-2.0

package apt

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const debianSources = `# The Debian archive
Types: deb deb-src
URIs: http://archive.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
Enabled: no
URIs: http://disabled.example/debian
Suites: bookworm
Components: main

Types: deb-src
URIs: http://source.example/debian
Suites: bookworm
Components: main

Types: deb
URIs: http://key.example/debian
Suites: bookworm-security
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 -----END PGP PUBLIC KEY BLOCK-----
`

func TestParseDeb822(t *testing.T) {
	const keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
	want := []Source{
		{URI: "http://archive.example/debian", Suite: "bookworm",
			Components: []string{"main", "contrib"}, SignedBy: keyring},
		{URI: "http://archive.example/debian", Suite: "bookworm-updates",
			Components: []string{"main", "contrib"}, SignedBy: keyring},
		{URI: "http://key.example/debian", Suite: "bookworm-security",
			Components: []string{"main"}},
	}

	if diff := cmp.Diff(want, parseDeb822(debianSources)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestParseOneLine(t *testing.T) {
	content := `# deb http://comment.example/debian bookworm main
deb http://plain.example/debian bookworm main contrib # trailing
deb [ arch=amd64 signed-by=/etc/apt/keyrings/x.gpg ] https://signed.example/debian trixie main
deb [arch=amd64] https://arch.example/debian trixie main
deb-src http://source.example/debian bookworm main
deb http://short.example/debian
`

	want := []Source{
		{URI: "http://plain.example/debian", Suite: "bookworm",
			Components: []string{"main", "contrib"}},
		{URI: "https://signed.example/debian", Suite: "trixie", Components: []string{"main"},
			SignedBy: "/etc/apt/keyrings/x.gpg"},
		{URI: "https://arch.example/debian", Suite: "trixie", Components: []string{"main"}},
	}

	if diff := cmp.Diff(want, parseOneLine(content)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestLineIsReadBack(t *testing.T) {
	for _, s := range []Source{
		{URI: "http://a.example/debian", Suite: "trixie", Components: []string{"main"}},
		{URI: "http://a.example/debian", Suite: "trixie", Components: []string{"main", "contrib"},
			SignedBy: "/k.gpg"},
	} {
		if diff := cmp.Diff([]Source{s}, parseOneLine(s.line())); diff != "" {
			t.Errorf("%s (-want +got):\n%s", s.line(), diff)
		}
	}
}

func TestMachineSource(t *testing.T) {
	for _, test := range []struct {
		name  string
		files map[string]string
		want  string // URI; empty for an error
	}{
		{"deb822", map[string]string{"sources.list.d/debian.sources": debianSources},
			"http://archive.example/debian"},
		{
			"one line", map[string]string{"sources.list": "deb http://list.example/debian " +
				"bookworm main\n"}, "http://list.example/debian",
		},
		{"the distribution's file first", map[string]string{
			"sources.list.d/debian.sources": debianSources,
			"sources.list.d/a.list":         "deb http://vendor.example bookworm main\n",
		}, "http://archive.example/debian"},
		{"another suite",
			map[string]string{"sources.list": "deb http://list.example/debian trixie main\n"}, ""},
		{"without main",
			map[string]string{"sources.list": "deb http://list.example/debian bookworm contrib\n"},
			""},
		{"nothing", nil, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			etc := t.TempDir()
			for name, content := range test.files {
				path := filepath.Join(etc, name)
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
					t.Fatal(err)
				}
			}

			got, err := MachineSource(etc, "bookworm")
			if test.want == "" {
				if err == nil || !strings.Contains(err.Error(), "bookworm") {
					t.Errorf("got %v, %v; want an error that names the suite", got, err)
				}
				return
			}

			if err != nil {
				t.Fatal(err)
			}
			if got.URI != test.want {
				t.Errorf("got %s, want %s", got.URI, test.want)
			}
		})
	}
}

func FuzzParse(f *testing.F) {
	f.Add(debianSources)
	f.Add("deb [signed-by=/a] b c d\n")
	f.Add("deb [")

	f.Fuzz(func(t *testing.T, content string) {
		for _, s := range append(parseDeb822(content), parseOneLine(content)...) {
			if s.URI == "" || s.Suite == "" {
				t.Errorf("a source without URI or suite: %+v", s)
			}
		}
	})
}
