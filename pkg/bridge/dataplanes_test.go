package bridge_test

import (
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge"
)

// dataPlaneTests are what holds with each data plane.
var dataPlaneTests = map[string]func(*testing.T, bridge.DataPlane){
	"BridgeIsFull":                      testBridgeIsFull,
	"ClientSuite":                       testClientSuite,
	"DeleteCleansUp":                    testDeleteCleansUp,
	"DiedBeforeMarking":                 testDiedBeforeMarking,
	"ForwardingHeals":                   testForwardingHeals,
	"LiesAreDropped":                    testLiesAreDropped,
	"MACStaysWithItsPort":               testMACStaysWithItsPort,
	"ManyVNIs":                          testManyVNIs,
	"NetdevsOfOthersAreLeftAlone":       testNetdevsOfOthersAreLeftAlone,
	"NetworksReachAcrossXPUs":           testNetworksReachAcrossXPUs,
	"NoFilter":                          testNoFilter,
	"OldMAC":                            testOldMAC,
	"PodsDoNotReachTheXPU":              testPodsDoNotReachTheXPU,
	"Quiet":                             testQuiet,
	"RepresentorComesAndGoes":           testRepresentorComesAndGoes,
	"RestartKeepsTraffic":               testRestartKeepsTraffic,
	"RestartRestoresWhatWasTakenAway":   testRestartRestoresWhatWasTakenAway,
	"StateIsMissing":                    testStateIsMissing,
	"StrayRepresentorIsReleasedAtStart": testStrayRepresentorIsReleasedAtStart,
	"TooManyVNIs":                       testTooManyVNIs,
	"UplinkComesAndGoes":                testUplinkComesAndGoes,
}

// TestDataPlanes: the data planes are equal.
func TestDataPlanes(t *testing.T) {
	t.Run("bridge-per-network", func(t *testing.T) { testDataPlane(t, bridge.DataPlaneBridgePerNetwork) })
	t.Run("vlan-aware", func(t *testing.T) {
		needVLANFiltering(t)
		testDataPlane(t, bridge.DataPlaneVLANAware)
	})
}

func testDataPlane(t *testing.T, plane bridge.DataPlane) {
	for name, test := range dataPlaneTests {
		t.Run(name, func(t *testing.T) { test(t, plane) })
	}
}
