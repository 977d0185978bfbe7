// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/opiproject/xpu-device-plugin/pkg/cordon"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestCordonOfUnknownUsers: when it is not known who has the Functions of a PF, cordon fails, because
// a script would take the missing lines for a PF that nobody uses. What was done is said all the same.
func TestCordonOfUnknownUsers(t *testing.T) {
	scheme, err := newScheme()
	must.Succeed(t, err)
	reader := fake.NewClientBuilder().WithScheme(scheme).WithInterceptorFuncs(interceptor.Funcs{
		List: func(context.Context, client.WithWatch, client.ObjectList, ...client.ListOption) error {
			return errors.New("forbidden")
		},
	}).Build()
	targets := []cordon.Target{{Node: "node1", PF: "0000:3b:00.0"}}

	for name, test := range map[string]struct {
		options cordonOptions
		want    string
		fails   bool
	}{
		"cordon":   {cordonOptions{cordoned: true}, "pf node1/0000:3b:00.0 cordoned", true},
		"dry run":  {cordonOptions{cordoned: true, dryRun: true}, "would be cordoned", true},
		"uncordon": {cordonOptions{}, "pf node1/0000:3b:00.0 uncordoned", false},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			c := command("xpuctl")
			c.SetContext(t.Context())
			c.SetOut(&out)
			c.SetErr(&out)
			err := test.options.print(c, reader, targets, targets)
			if (err != nil) != test.fails || err != nil &&
				!strings.Contains(err.Error(), "which pods have their Functions is not known") {
				t.Errorf("error %v, want one: %t", err, test.fails)
			}
			if !strings.Contains(out.String(), test.want) {
				t.Errorf("output %q, want %q in it", out.String(), test.want)
			}
		})
	}
}
