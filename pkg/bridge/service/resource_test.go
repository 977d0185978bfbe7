// SPDX-License-Identifier: Apache-2.0

package service

import (
	"context"
	"strings"
	"testing"

	"github.com/go-logr/logr/funcr"
	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	opibridge "github.com/opiproject/xpu-device-plugin/api/opibridge/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/refusal"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestLongInput checks that an error does not repeat all that a client sent (AIP-193: messages
// should be brief). Errors are logged, and come back to the client in a header.
func TestLongInput(t *testing.T) {
	long := strings.Repeat("x", 1<<20)
	a, _ := newTestAgent(t)
	bad := accessPort(mac1, blue)
	bad.MacAddress = []byte(long)
	_, errMAC := a.create(t, p1, bad)
	_, err := a.create(t, p1, accessPort(mac1, blue))
	must.Succeed(t, err)
	_, errMask := a.update(t, p1, accessPort(mac1, blue), false, long)
	_, errAddress := optionsServer{Agent: a}.UpdatePortOptions(t.Context(),
		&opibridge.UpdatePortOptionsRequest{Options: &opibridge.PortOptions{
			Name: portNames.prefix + p1, Addresses: []string{long},
		}})
	_, errName := networkNames.parseName(long)
	_, errID := portNames.parseName(portNames.prefix + long)
	_, _, errToken := page(nil, 0, long)
	for what, err := range map[string]error{
		"name": errName, "id": errID, "token": errToken, "MAC": errMAC, "mask": errMask,
		"address": errAddress,
	} {
		if err == nil || len(err.Error()) > 1200 {
			t.Errorf("%s: %.200v", what, err)
		}
	}
}

// TestLongNameInLog checks that a line of the log does not repeat all that a client sent.
func TestLongNameInLog(t *testing.T) {
	a, _ := newTestAgent(t)
	longest := 0
	a.log = funcr.New(func(_, text string) { longest = max(longest, len(text)) }, funcr.Options{})

	name := strings.Repeat("x", 1<<20)
	_, _ = a.observe(t.Context(), &evpn.GetBridgePortRequest{Name: name},
		&grpc.UnaryServerInfo{FullMethod: "/evpn/GetBridgePort"},
		func(context.Context, any) (any, error) {
			return nil, refusal.New(codes.InvalidArgument, refusal.InvalidName, "name %s", name)
		})
	if longest == 0 || longest > 2000 {
		t.Errorf("a line of %d bytes", longest)
	}
}
