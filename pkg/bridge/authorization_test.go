package bridge

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestReadAuthorization(t *testing.T) {
	for name, test := range map[string]struct{ text, says string }{
		"rules":         {"rules: [{subject: CN=a, networks: ['net-*'], ports: []}, {subject: CN=b, readOnly: true}]", ""},
		"none":          {"rules: []", ""},
		"no subject":    {"rules: [{networks: ['*']}]", "rules[0].subject: is missing"},
		"twice":         {"rules: [{subject: CN=a}, {subject: CN=a}]", "rules[1].subject: CN=a has a rule already"},
		"pattern":       {"rules: [{subject: CN=a, ports: ['[']}]", `pattern "["`},
		"unknown field": {"rules: [{subject: CN=a, verbs: [get]}]", "verbs"},
		"no YAML":       {"rules: [", "yaml"},
	} {
		file := filepath.Join(t.TempDir(), "authorization.yaml")
		if err := os.WriteFile(file, []byte(test.text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := ReadAuthorization(file)
		if test.says == "" && err != nil || test.says != "" && (err == nil || !strings.Contains(err.Error(), test.says) || !strings.Contains(err.Error(), file)) {
			t.Errorf("%s: error %v, want one with %q and the file", name, err, test.says)
		}
	}
}

func FuzzReadAuthorization(f *testing.F) {
	f.Add("rules: [{subject: CN=a, networks: ['net-*'], ports: []}]")
	f.Fuzz(func(t *testing.T, text string) {
		file := filepath.Join(t.TempDir(), "authorization.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		a, err := ReadAuthorization(file)
		if err != nil {
			return
		}
		for _, r := range a.Rules {
			if r.Subject == "" {
				t.Error("a rule for nobody")
			}
			(client{restricted: true, rule: r}).sees("vf-0000-3b-00-2", []string{"net-blue"})
		}
	})
}
