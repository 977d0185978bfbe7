// SPDX-License-Identifier: Apache-2.0

package profiles_test

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/monitoring/profiles"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

func TestListen(t *testing.T) {
	for address, want := range map[string]string{
		"0.0.0.0:6060": "not a loopback address", ":6060": "not a loopback address",
		"192.0.2.1:6060":   "not a loopback address",
		"xpu.example:6060": "not a loopback address", "6060": "not host:port",
	} {
		if _, err := profiles.Listen(address); err == nil ||
			!strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), address) {
			t.Errorf("%s: error %v, want one with %q", address, err, want)
		}
	}
}

func TestProfiles(t *testing.T) {
	listener, err := profiles.Listen("localhost:0")
	must.Succeed(t, err)
	stop := must.Run(t, func(ctx context.Context) error {
		return profiles.Serve(ctx, listener, logr.Discard())
	})
	defer stop()

	for path, want := range map[string]string{
		"": "goroutine", "goroutine?debug=1": "TestProfiles", "heap?debug=1": "heap profile",
		"cmdline": "test",
	} {
		response, err := http.Get("http://" + listener.Addr().String() + "/debug/pprof/" + path)
		must.Succeed(t, err)
		text, err := io.ReadAll(response.Body)
		must.Succeed(t, err)
		must.Succeed(t, response.Body.Close())
		if !strings.Contains(string(text), want) {
			t.Errorf("/debug/pprof/%s is %.200s, want %q in it", path, text, want)
		}
	}
}
