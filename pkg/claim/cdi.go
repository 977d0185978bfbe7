package claim

import (
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// CDIKind is the vendor and class of CDI devices for claims' Functions.
const CDIKind = v1alpha1.GroupName + "/function"

// uidLength is the length of a claim's UID, RFC 9562.
const uidLength = 36

// CDIDeviceName is the name of the CDI device for a claim's device: "<UID>-<device>". The UID keeps a runtime from using a
// cached device of another claim.
func CDIDeviceName(claim types.UID, device string) string { return string(claim) + "-" + device }

// ParseCDIDevice parses the qualified name of a CDI device, "xpu.opiproject.org/function=<UID>-<device>". ok is false for
// other devices.
func ParseCDIDevice(qualified string) (claim types.UID, id function.ID, ok bool) {
	kind, name, _ := strings.Cut(qualified, "=")
	if kind != CDIKind {
		return "", function.ID{}, false
	}
	return SplitCDIDeviceName(name)
}

// SplitCDIDeviceName reverses [CDIDeviceName]. Multus up to 4.3 passes this name for a claim's device.
func SplitCDIDeviceName(name string) (claim types.UID, id function.ID, ok bool) {
	if len(name) <= uidLength || name[uidLength] != '-' {
		return "", function.ID{}, false
	}
	id, err := function.ParseDeviceName(name[uidLength+1:])
	return types.UID(name[:uidLength]), id, err == nil
}
