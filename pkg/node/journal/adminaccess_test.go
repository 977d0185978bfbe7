// SPDX-License-Identifier: Apache-2.0

package journal_test

import (
	"path/filepath"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestAdminAccess: the records of claims with adminAccess survive the agent, until they are
// deleted.
func TestAdminAccess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal.db")
	j, err := journal.Open(path)
	must.Succeed(t, err)
	seen, other := function.ID{Address: "0000:3b:00.2"}, function.ID{Address: "0000:3b:00.3"}
	access := journal.AdminAccess{Namespace: "default", Name: "all", Functions: []function.ID{seen}}
	must.Succeed(t, j.PutAdminAccess("uid", access))
	must.Succeed(t, j.PutAdminAccess("uid", access))
	must.Succeed(t, j.DeleteAdminAccess("another"))
	must.Succeed(t, j.Close())
	j, err = journal.Open(path)
	must.Succeed(t, err)
	defer j.Close()

	for _, test := range []struct {
		namespace, name string
		f               function.ID
		want            bool
	}{
		{"default", "all", seen, true}, {"default", "all", other, false},
		{"default", "some", seen, false}, {"shop", "all", seen, false},
	} {
		if got := j.HasAdminAccess(test.namespace, test.name, test.f); got != test.want {
			t.Errorf("%s/%s sees %s: %t, want %t", test.namespace, test.name, test.f,
				got, test.want)
		}
	}

	if all := j.All(); len(all) > 0 {
		t.Errorf("attachments %+v", all)
	}

	must.Succeed(t, j.DeleteAdminAccess("uid"))
	if j.HasAdminAccess("default", "all", seen) {
		t.Error("the claim still sees the Function")
	}
}
