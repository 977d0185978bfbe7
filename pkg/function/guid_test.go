// SPDX-License-Identifier: Apache-2.0

package function_test

import (
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

func TestGUID(t *testing.T) {
	for text, want := range map[string]function.GUID{
		"00:11:22:33:44:55:66:77": "00:11:22:33:44:55:66:77",
		"0A:11:22:33:44:55:66:fF": "0a:11:22:33:44:55:66:ff",
		"00:00:00:00:00:00:00:00": "00:00:00:00:00:00:00:00",
		"":                        "",
		"00:11:22:33:44:55":       "",
		"00-11-22-33-44-55-66-77": "",
		"0011.2233.4455.6677":     "",
		"0011223344556677":        "",
		"0x0011223344556677":      "",
		"00:11:22:33:44:55:66:7g": "",
	} {
		got, err := function.ParseGUID(text)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v, want %q", text, got, err, want)
		}
	}

	for guid, want := range map[function.GUID]bool{
		"00:11:22:33:44:55:66:77": true, "ff:ff:ff:ff:ff:ff:ff:fe": true,
		"00:00:00:00:00:00:00:01": true, "00:00:00:00:00:00:00:00": false,
		"ff:ff:ff:ff:ff:ff:ff:ff": false, "": false, "00:11": false,
	} {
		if got := guid.IsUsable(); got != want {
			t.Errorf("%q is usable: %t, want %t", guid, got, want)
		}
	}

	if got := function.GUIDOf(0x0011223344556677); got != "00:11:22:33:44:55:66:77" {
		t.Errorf("GUID of a number: %q", got)
	}
}

// TestInfiniBandAddress checks what of an address belongs to the port, and what to the netdev.
func TestInfiniBandAddress(t *testing.T) {
	const (
		ethernet = "02:00:00:00:00:01"
		was      = "80:00:10:28:fe:80:00:00:00:00:00:00:00:11:22:33:44:55:66:77"
		is       = "80:00:10:99:fe:80:00:00:00:00:00:01:0a:0a:0a:0a:0a:0a:0a:0a"
	)
	for mac, want := range map[function.MAC]function.GUID{
		was: "00:11:22:33:44:55:66:77", ethernet: "", "": "", "00:11:22:33:44:55:66:77": "",
	} {
		if got := mac.PortGUID(); got != want {
			t.Errorf("%q has port GUID %q, want %q", mac, got, want)
		}
	}

	for _, test := range []struct{ mac, now, want function.MAC }{
		{was, is, "80:00:10:99:fe:80:00:00:00:00:00:01:00:11:22:33:44:55:66:77"},
		{was, was, was}, {ethernet, is, ethernet}, {was, ethernet, was}, {was, "", was}, {"", is, ""},
	} {
		if got := test.mac.At(test.now); got != test.want {
			t.Errorf("%q at a netdev with %q: %q, want %q", test.mac, test.now, got, test.want)
		}
	}
}
