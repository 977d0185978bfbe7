// SPDX-License-Identifier: Apache-2.0

package evpngw_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
)

func TestHostPFs(t *testing.T) {
	const one = "host-pf c1pf0 hw_addr 02:00:00:00:00:01 serial MT2334XZ0LTK"
	for what, test := range map[string]struct {
		told    []string
		want    []opi.HostPF
		problem string
	}{
		"the reference agent, whose inventory would end it": {},
		"two PFs": {
			told: []string{one, "host-pf c1pf1"},
			want: []opi.HostPF{
				{Name: "c1pf0", MAC: "02:00:00:00:00:01", Serial: "MT2334XZ0LTK"}, {Name: "c1pf1"},
			},
		},
		"as many as there may be": {
			told: slices.Repeat([]string{"host-pf pf0"}, opi.MaxHostPFs),
			want: slices.Repeat([]opi.HostPF{{Name: "pf0"}}, opi.MaxHostPFs),
		},
		"too many": {
			told:    slices.Repeat([]string{one}, opi.MaxHostPFs+1),
			problem: "the agent lists more than 64 PFs of its host",
		},
		"garbage": {
			told:    []string{one, "host-pf ../../etc"},
			problem: `"host-pf ../../etc" is not of the form`,
		},
	} {
		agent := opitest.Start(t)
		agent.Set(func(b *opitest.Behaviour) { b.HostPFs = test.told })
		client, err := opi.Dial(agent.Config())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = client.Close() })

		got, err := client.HostPFs(t.Context())
		if diff := cmp.Diff(test.want, got); diff != "" || !says(err, test.problem) {
			t.Errorf("%s: error %v, want %q; PFs (-want +got):\n%s", what, err, test.problem, diff)
		}
		if err := client.Check(t.Context()); err != nil {
			t.Errorf("%s: the agent does not answer any more: %v", what, err)
		}
	}
}

func says(err error, problem string) bool {
	return (err == nil) == (problem == "") && (err == nil || strings.Contains(err.Error(), problem))
}
