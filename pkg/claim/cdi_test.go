// SPDX-License-Identifier: Apache-2.0

package claim_test

import (
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

func TestParseCDIDevice(t *testing.T) {
	const uid = types.UID("0f0e0d0c-0b0a-0908-0706-050403020100")
	vf := function.ID{Address: "0000:3b:02.1"}
	got, id, ok := claim.ParseCDIDevice(claim.CDIKind + "=" +
		claim.CDIDeviceName(uid, vf.DeviceName()))
	if !ok || got != uid || id != vf {
		t.Errorf("ParseCDIDevice = %s, %s, %t", got, id, ok)
	}

	for _, name := range []string{
		"", claim.CDIKind, claim.CDIKind + "=all", claim.CDIKind + "=" + string(uid),
		claim.CDIKind + "=" + string(uid) + "-x",
		"nvidia.com/gpu=" + claim.CDIDeviceName(uid, vf.DeviceName()),
	} {
		if _, _, ok := claim.ParseCDIDevice(name); ok {
			t.Errorf("%q is taken for a claim's Function", name)
		}
	}
}

func FuzzParseCDIDevice(f *testing.F) {
	f.Add(claim.CDIKind + "=0f0e0d0c-0b0a-0908-0706-050403020100-0000-3b-02-1")
	f.Fuzz(func(t *testing.T, name string) {
		if uid, id, ok := claim.ParseCDIDevice(name); ok &&
			claim.CDIKind+"="+claim.CDIDeviceName(uid, id.DeviceName()) != name {
			t.Errorf("%q is read as %s of %s", name, id, uid)
		}
	})
}
