package image

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestReadContainerfile(t *testing.T) {
	for name, test := range map[string]struct {
		text string
		want Spec
		err  string
	}{
		"all": {
			text: "# the app\nFROM scratch\nCOPY app tools/helper /\nCOPY app /usr/bin/app\nUSER 65532\nENTRYPOINT [\"/app\", \"-v\"]\n",
			want: Spec{Entrypoint: []string{"/app", "-v"}, User: "65532", Files: []File{
				{"bin/app", "/app"}, {"bin/tools/helper", "/helper"}, {"bin/app", "/usr/bin/app"},
			}},
		},
		"another base":    {text: "FROM alpine\nCOPY app /\n", err: "FROM scratch"},
		"two stages":      {text: "FROM scratch AS a\nCOPY app /\nFROM scratch\nCOPY --from=a /app /\n", err: "one stage"},
		"shell":           {text: "FROM scratch\nENTRYPOINT /app\n", err: "line 2: ENTRYPOINT: must be a list"},
		"run":             {text: "FROM scratch\nRUN make\n", err: "line 2: RUN: is not among"},
		"chmod":           {text: "FROM scratch\nCOPY --chmod=755 app /\n", err: "sources and a destination only"},
		"outside":         {text: "FROM scratch\nCOPY ../app /\n", err: "COPY ../app: must be the path"},
		"pattern":         {text: "FROM scratch\nCOPY app* /\n", err: "COPY app*: must be the path"},
		"several to file": {text: "FROM scratch\nCOPY a b /app\n", err: "must end with /"},
		"relative":        {text: "FROM scratch\nCOPY a app\n", err: "absolute path"},
		"nonsense":        {text: "FROM scratch\nCOPPY a /\n", err: "COPPY"},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "Containerfile")
			if err := os.WriteFile(file, []byte(test.text), 0o644); err != nil {
				t.Fatal(err)
			}
			got, err := ReadContainerfile(file, "bin")
			if test.err != "" {
				if err == nil || !strings.Contains(err.Error(), test.err) || !strings.Contains(err.Error(), file) {
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
