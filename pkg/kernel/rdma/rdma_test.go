// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"encoding/binary"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink/nl"
)

// message returns the attributes of a message of the kernel.
func message(attributes ...*nl.RtAttr) []byte {
	var out []byte
	for _, a := range attributes {
		out = append(out, a.Serialize()...)
	}
	return out
}

// The kernel's answer about an RDMA device has more attributes than these
// (fill_dev_info of drivers/infiniband/core/nldev.c).
var (
	index = nl.NewRtAttr(nl.RDMA_NLDEV_ATTR_DEV_INDEX, nl.Uint32Attr(7))
	name  = nl.NewRtAttr(nl.RDMA_NLDEV_ATTR_DEV_NAME, nl.ZeroTerminated("mlx5_2"))
	guid  = nl.NewRtAttr(nl.RDMA_NLDEV_ATTR_NODE_GUID,
		binary.NativeEndian.AppendUint64(nil, 0x020000fffe000001))
	on = nl.NewRtAttr(adaptiveModeration, []byte{1})
)

func TestParse(t *testing.T) {
	tests := map[string]struct {
		message []byte
		want    Device
		err     string
	}{
		"all": {
			message: message(index, name, guid, on),
			want: Device{
				Index: 7, Name: "mlx5_2", GUID: "0200:00ff:fe00:0001", Moderation: new(true),
			},
		},
		"an old kernel": {message: message(index, name), want: Device{Index: 7, Name: "mlx5_2"}},
		"no index":      {message: message(name), err: "no index or no name"},
		"no name":       {message: message(index), err: "no index or no name"},
		"too short":     {message: message(index, name)[:9], err: "attribute of"},
	}

	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := parse(tt.message)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("error %v, want one with %q", err, tt.err)
				}
				return
			}
			if diff := cmp.Diff(tt.want, got); err != nil || diff != "" {
				t.Errorf("%v; (-want +got):\n%s", err, diff)
			}
		})
	}
}

// FuzzParse checks that no answer makes parse panic, or yields a device without a name's end.
func FuzzParse(f *testing.F) {
	f.Add(message(index, name, guid, on))
	f.Add(message(index, name)[:9])
	f.Fuzz(func(t *testing.T, message []byte) {
		d, err := parse(message)
		if err == nil && strings.Contains(d.Name, "\x00") {
			t.Errorf("name %q", d.Name)
		}
	})
}
