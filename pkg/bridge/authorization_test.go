package bridge

import (
	"strings"
	"testing"
)

func TestParseAuthorization(t *testing.T) {
	for name, test := range map[string]struct{ text, says string }{
		"rules":         {"rules: [{subject: CN=a, networks: ['net-*'], ports: []}, {subject: CN=b, readOnly: true}]", ""},
		"none":          {"rules: []", ""},
		"no subject":    {"rules: [{networks: ['*']}]", "rules[0].subject: is missing"},
		"twice":         {"rules: [{subject: CN=a}, {subject: CN=a}]", "rules[1].subject: CN=a has a rule already"},
		"pattern":       {"rules: [{subject: CN=a, ports: ['[']}]", `pattern "["`},
		"unknown field": {"rules: [{subject: CN=a, verbs: [get]}]", "verbs"},
		"no YAML":       {"rules: [", "yaml"},
	} {
		_, err := ParseAuthorization([]byte(test.text))
		if test.says == "" && err != nil || test.says != "" && (err == nil || !strings.Contains(err.Error(), test.says)) {
			t.Errorf("%s: error %v, want one with %q", name, err, test.says)
		}
	}
}

func FuzzParseAuthorization(f *testing.F) {
	f.Add("rules: [{subject: CN=a, networks: ['net-*'], ports: []}]")
	f.Fuzz(func(t *testing.T, text string) {
		a, err := ParseAuthorization([]byte(text))
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
