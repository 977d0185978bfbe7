// SPDX-License-Identifier: Apache-2.0

package image

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRead(t *testing.T) {
	for name, test := range map[string]struct {
		text string
		want Spec
		err  string
	}{
		"all": {
			text: "# the app\nFROM scratch\nCOPY app tools/helper /\nCOPY app /usr/bin/app\nUSER " +
				"65532\nENTRYPOINT [\"/app\", \"-v\"]\n",
			want: Spec{Arch: "arm64", Entrypoint: []string{"/app", "-v"}, User: "65532",
				Files: []File{
					{"bin/app", "/app"}, {"bin/tools/helper", "/helper"},
					{"bin/app", "/usr/bin/app"},
				}},
		},
		"arguments": {
			text: "FROM scratch\nARG TARGETARCH\nARG VERSION=dev\nARG BY=me\nCOPY " +
				"linux/${TARGETARCH}/app /\n" +
				"LABEL version=$VERSION by=\"$BY\" arch=\"for $TARGETARCH\"\n",
			want: Spec{Arch: "arm64", Labels: map[string]string{
				"version": "v1.2.3", "by": "me", "arch": "for arm64",
			}, Files: []File{
				{"bin/linux/arm64/app", "/app"},
			}},
		},
		"argument not declared": {
			text: "FROM scratch\nLABEL version=$VERSION\n",
			err:  "line 2: LABEL: VERSION is not declared",
		},
		"argument not given": {
			text: "FROM scratch\nARG REVISION\n", err: "line 2: ARG REVISION: has neither",
		},
		"another base": {text: "FROM alpine\nCOPY app /\n", err: "FROM scratch"},
		"two stages": {
			text: "FROM scratch AS a\nCOPY app /\nFROM scratch\nCOPY --from=a /app /\n",
			err:  "one stage",
		},
		"shell": {
			text: "FROM scratch\nENTRYPOINT /app\n", err: "line 2: ENTRYPOINT: must be a list",
		},
		"run": {
			text: "FROM scratch\nRUN make\n", err: "line 2: RUN: is not among",
		},
		"chmod": {
			text: "FROM scratch\nCOPY --chmod=755 app /\n", err: "sources and a destination only",
		},
		"outside": {
			text: "FROM scratch\nCOPY ../app /\n", err: "COPY ../app: must be the path",
		},
		"pattern": {
			text: "FROM scratch\nCOPY app* /\n", err: "COPY app*: must be the path",
		},
		"several to file": {text: "FROM scratch\nCOPY a b /app\n", err: "must end with /"},
		"relative":        {text: "FROM scratch\nCOPY a app\n", err: "absolute path"},
		"nonsense":        {text: "FROM scratch\nCOPPY a /\n", err: "COPPY"},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "Containerfile")
			if err := os.WriteFile(file, []byte(test.text), 0o644); err != nil {
				t.Fatal(err)
			}

			got, err := Source{file, "bin", map[string]string{"VERSION": "v1.2.3"}}.Read("arm64")
			if test.err != "" {
				if err == nil || !strings.Contains(err.Error(), test.err) ||
					!strings.Contains(err.Error(), file) {
					t.Errorf("error %v, want one with %q and the file", err, test.err)
				}
				return
			}

			if diff := cmp.Diff(test.want, got); err != nil || diff != "" {
				t.Errorf("%v, -want +got:\n%s", err, diff)
			}
		})
	}
}
