// SPDX-License-Identifier: Apache-2.0

package dialects_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/dialects"
)

func TestNamed(t *testing.T) {
	for _, name := range append(dialects.Names(), "") {
		if d, err := dialects.Named(name); d == nil || err != nil {
			t.Errorf("%q: %v, %v", name, d, err)
		}
	}
	if _, err := dialects.Named("klingon"); err == nil ||
		!strings.Contains(err.Error(), `"klingon": must be one of ["evpn-gw"]`) {
		t.Errorf("error %v", err)
	}
}

// TestKinds checks that every dialect of the XPU API exists.
func TestKinds(t *testing.T) {
	if !slices.Contains(dialects.Names(), string(v1alpha1.DialectEVPNGW)) {
		t.Errorf("the API's %s is none of %q", v1alpha1.DialectEVPNGW, dialects.Names())
	}
}
