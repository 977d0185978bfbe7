// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// TestSysctlsAreThoseOfProcfs checks that every sysctl has the value of its file, however it was
// read, and that every file of the netdev's directories is read or known to be covered elsewhere.
func TestSysctlsAreThoseOfProcfs(t *testing.T) {
	host := netns.New(t)
	must.Succeed(t, host.Handle().LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "v0"}, PeerName: "v1",
	}))
	e, err := New(Options{HostNetNS: host.Path()})
	must.Succeed(t, err)
	defer e.Close()

	for group, test := range map[string]struct {
		directory string
		except    []string
	}{
		"net.ipv4.neigh": {"sys/net/ipv4/neigh", neighbourTwins},
		"net.ipv6.neigh": {"sys/net/ipv6/neigh", neighbourTwins},
		"net.ipv6.conf":  {"sys/net/ipv6/conf", confElsewhere()},
	} {
		t.Run(group, func(t *testing.T) {
			dir := sysfs.Root("/proc").Dir(test.directory, "v0")
			want := map[string]string{}
			must.Succeed(t, namespace.Do(e.host.ns, func() error {
				names, _, err := dir.Names()
				names = slices.DeleteFunc(names, func(name string) bool {
					return slices.Contains(test.except, name)
				})
				for value := 1; value < 3; value++ { // one differs from the default
					for _, name := range names {
						if name != stableSecret {
							_ = dir.Write(name, strings.Repeat("1", value)) // some files refuse it
						}
					}
				}

				want, _ = dir.Attributes(names...)
				return err
			}))

			if len(want) < 10 {
				t.Fatalf("procfs has %v", want)
			}

			l, err := e.host.named("v0")
			must.Succeed(t, err)
			got := e.startReading(l, e.settings)()[group]
			delete(got, stableSecret)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("-procfs +read\n%s", diff)
			}
		})
	}
}
