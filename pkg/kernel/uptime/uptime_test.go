// SPDX-License-Identifier: Apache-2.0

package uptime

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

func TestAfter(t *testing.T) {
	const now, before = "boot-2", "boot-1"
	at := func(boot string, since time.Duration) Moment {
		return Moment{BootID: boot, Since: since}
	}
	for name, test := range map[string]struct {
		m, other     Moment
		after, known bool
	}{
		"later":                     {at(now, 2), at(now, 1), true, true},
		"at the same time":          {at(now, 1), at(now, 1), false, true},
		"earlier":                   {at(now, 1), at(now, 2), false, true},
		"since the boot":            {at(now, 1), at(before, 2), true, true},
		"before the boot":           {at(before, 2), at(now, 1), false, true},
		"both in one earlier boot":  {at(before, 2), at(before, 1), true, true},
		"in two earlier boots":      {at(before, 2), at("boot-0", 1), false, false},
		"the moment was not told":   {Moment{}, at(now, 1), false, false},
		"the other one was not":     {at(now, 1), Moment{}, false, false},
		"neither one was ever told": {Moment{}, Moment{}, false, false},
	} {
		if after, known := test.m.After(test.other, now); after != test.after ||
			known != test.known {
			t.Errorf("%s: after %t, known %t; want %t, %t", name, after, known, test.after,
				test.known)
		}
	}
}

func TestOf(t *testing.T) {
	first := Of("boot-1")
	if second := Of("boot-1"); !first.Known() || first.Since <= 0 || second.Since < first.Since {
		t.Errorf("first %v, then %v", first, second)
	}
}

func TestBootID(t *testing.T) {
	root := t.TempDir()
	if _, err := BootID(root); err == nil {
		t.Error("a boot ID without a file")
	}

	must.Succeed(t, os.MkdirAll(filepath.Join(root, "sys/kernel/random"), 0o755))
	must.Succeed(t,
		os.WriteFile(filepath.Join(root, "sys/kernel/random/boot_id"), []byte("b-1\n"), 0o644))
	if id, err := BootID(root); err != nil || id != "b-1" {
		t.Errorf("boot ID %q, error %v", id, err)
	}
}
