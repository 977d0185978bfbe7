// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"encoding/json"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// Choice is what the agent writes to ResourceClaim.status.devices[].data of a share: the Function
// that it chose.
type Choice struct {
	Function function.ID `json:"function"`
}

// Data returns the choice in the form of a claim's status.
func (c Choice) Data() (*runtime.RawExtension, error) {
	raw, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	return &runtime.RawExtension{Raw: raw}, nil
}

// chosenFunction returns the Function that the agent chose for a share, or the zero value if it has
// not chosen yet. It ignores data that cannot be parsed, because an agent did not write it.
func chosenFunction(
	claim *resourceapi.ResourceClaim, result resourceapi.DeviceRequestAllocationResult,
) function.ID {
	for _, entry := range claim.Status.Devices {
		if !IsOf(&entry, result.Pool, result.Device, ptr.Deref(result.ShareID, "")) ||
			entry.Data == nil {
			continue
		}
		var c Choice
		if err := json.Unmarshal(entry.Data.Raw, &c); err == nil {
			return c.Function
		}
	}
	return function.ID{}
}

// IsOf reports whether an entry of ResourceClaim.status.devices is for this device of the driver,
// or for this share of it.
func IsOf(entry *resourceapi.AllocatedDeviceStatus, pool, device string, share types.UID) bool {
	return entry.Driver == v1alpha1.GroupName && entry.Pool == pool && entry.Device == device &&
		ptr.Deref(entry.ShareID, "") == string(share)
}

// NewEntry returns an entry of ResourceClaim.status.devices without data.
func NewEntry(pool, device string, share types.UID) resourceapi.AllocatedDeviceStatus {
	entry := resourceapi.AllocatedDeviceStatus{
		Driver: v1alpha1.GroupName, Pool: pool, Device: device,
	}
	if share != "" {
		entry.ShareID = ptr.To(string(share))
	}
	return entry
}

// Megabit is the unit of bandwidth, in bit/s, because drivers take the rate of a VF in Mbit/s.
const Megabit = 1_000_000

// bandwidth returns a share's part of its PF's bandwidth, in Mbit/s. The scheduler has rounded it
// to whole Mbit/s. The name of the capacity may have the driver's domain, and is preferred then
// (DeviceRequestAllocationResult.ConsumedCapacity in resource.k8s.io/v1 of Kubernetes 1.38).
func bandwidth(result resourceapi.DeviceRequestAllocationResult) int {
	consumed, full := result.ConsumedCapacity[v1alpha1.GroupName+"/"+CapacityBandwidth]
	if !full {
		consumed = result.ConsumedCapacity[CapacityBandwidth]
	}
	return int(consumed.Value() / Megabit)
}

// limitRate returns the configuration of a VF whose claim has this much bandwidth, in Mbit/s: its
// maximum rate must not be higher.
func limitRate(wanted *function.VFConfig, bandwidth int) (*function.VFConfig, error) {
	config := ptr.Deref(wanted, function.VFConfig{})
	for _, rate := range []struct {
		field string
		value *int
	}{{"vf.maxTxRate", config.MaxTxRate}, {"vf.minTxRate", config.MinTxRate}} {
		if rate.value != nil && *rate.value > bandwidth {
			return wanted, fmt.Errorf("%s %d: is more than the %d Mbit/s of the link that the "+
				"claim has; ask for more capacity %s",
				rate.field, *rate.value, bandwidth, CapacityBandwidth)
		}
	}

	if ptr.Deref(config.MaxTxRate, 0) == 0 { // 0 means unlimited
		config.MaxTxRate = &bandwidth
	}

	return &config, nil
}
