// SPDX-License-Identifier: Apache-2.0

package access

import "testing"

func TestTenant(t *testing.T) {
	rules := func(text string) *Credentials {
		a, err := ParseAuthorization([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		c := &Credentials{}
		c.current.Store(&parsed{authorization: a})
		return c
	}

	const all = `
rules:
- {subject: CN=xpu-controller, networks: ["*"], ports: ["*"], vlans: ["1-4094"], vnis: []}
- {subject: CN=a, networks: [net-a-*], ports: [vf-*], vlans: ["10"], vnis: []}
- {subject: CN=b, networks: [net-b-*, net-shared], ports: [vf-*], vlans: ["20"], vnis: []}
- {subject: CN=c, networks: [net-shared], ports: [vf-*], vlans: ["30"], vnis: []}
- {subject: CN=reader, networks: [net-a-*], ports: [vf-*], readOnly: true}
`
	c := rules(all)
	for _, test := range []struct {
		port     string
		networks []string
		want     string
	}{
		{"vf-0000-03-00-2", []string{"net-a-1"}, "CN=a"},
		{"vf-0000-03-00-2", []string{"net-a-1", "net-a-2"}, "CN=a"},
		{"vf-0000-03-00-2", []string{"net-a-1", "net-b-1"}, ""},
		{"vf-0000-03-00-2", []string{"net-shared"}, ""},
		{"vf-0000-03-00-2", []string{"net-other"}, ""},
		{"sf-03-00-0-1", []string{"net-a-1"}, ""},
	} {
		if got := c.Tenant(test.port, test.networks); got != test.want {
			t.Errorf("%s in %v: %q, want %q", test.port, test.networks, got, test.want)
		}
	}

	open := &Credentials{}
	open.current.Store(&parsed{})
	if got := open.Tenant("vf-0000-03-00-2", []string{"net-a-1"}); got != "" {
		t.Errorf("without rules: %q", got)
	}
}
