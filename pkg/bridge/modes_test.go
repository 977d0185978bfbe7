// SPDX-License-Identifier: Apache-2.0

package bridge_test

import (
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// dataPlaneTests hold in each mode of the data plane.
var dataPlaneTests = map[string]func(*testing.T, plane.Mode){
	"AddressesStayWithTheirPort":        testAddressesStayWithTheirPort,
	"BlockedWithoutAddress":             testBlockedWithoutAddress,
	"BridgeIsFull":                      testBridgeIsFull,
	"ClientSuite":                       testClientSuite,
	"Conformance":                       testConformance,
	"Counters":                          testCounters,
	"DeleteCleansUp":                    testDeleteCleansUp,
	"UnmarkedBridge":                    testUnmarkedBridge,
	"ForwardingIsRestored":              testForwardingIsRestored,
	"IPv6Underlay":                      testIPv6Underlay,
	"SpoofingIsDropped":                 testSpoofingIsDropped,
	"MACStaysWithItsPort":               testMACStaysWithItsPort,
	"MTUIsRefused":                      testMTUIsRefused,
	"ManyVNIs":                          testManyVNIs,
	"NetdevsOfOthersAreLeftAlone":       testNetdevsOfOthersAreLeftAlone,
	"NetworksReachAcrossXPUs":           testNetworksReachAcrossXPUs,
	"NoFilter":                          testNoFilter,
	"OldMAC":                            testOldMAC,
	"PodsDoNotReachTheXPU":              testPodsDoNotReachTheXPU,
	"PodsDoNotReachTheXPUByIPv6":        testPodsDoNotReachTheXPUByIPv6,
	"Quiet":                             testQuiet,
	"Remotes":                           testRemotes,
	"RepresentorComesAndGoes":           testRepresentorComesAndGoes,
	"RestartKeepsTraffic":               testRestartKeepsTraffic,
	"RestartRestoresWhatWasTakenAway":   testRestartRestoresWhatWasTakenAway,
	"SeveralUplinks":                    testSeveralUplinks,
	"VTEP":                              testVTEP,
	"StateIsMissing":                    testStateIsMissing,
	"StrayRepresentorIsReleasedAtStart": testStrayRepresentorIsReleasedAtStart,
	"TooManyVNIs":                       testTooManyVNIs,
	"UnderlayIsChosen":                  testUnderlayIsChosen,
	"UplinkComesAndGoes":                testUplinkComesAndGoes,
	"UplinkIsBlocked":                   testUplinkIsBlocked,
	"UplinkOfKind":                      testUplinkOfKind,
}

// TestDataPlanes checks that both modes of the data plane behave in the same way.
func TestDataPlanes(t *testing.T) {
	t.Run("bridge-per-network", func(t *testing.T) {
		testDataPlane(t, plane.ModeBridgePerNetwork)
	})
	t.Run("vlan-aware", func(t *testing.T) {
		netns.Need(t, netns.VLANFiltering())
		testDataPlane(t, plane.ModeVLANAware)
	})
}

func testDataPlane(t *testing.T, mode plane.Mode) {
	for name, test := range dataPlaneTests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, mode)
		})
	}
}
