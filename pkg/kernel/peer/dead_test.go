// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

func TestRemoveDead(t *testing.T) {
	dir := must.SocketDir(t)
	socket := func(name string) *net.UnixListener {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, name), Net: "unix"})
		must.Succeed(t, err)
		l.SetUnlinkOnClose(false)
		t.Cleanup(func() { l.Close() })
		return l
	}

	socket("a-served.sock")
	must.Succeed(t, socket("a-dead.sock").Close())
	must.Succeed(t, socket("other-dead.sock").Close())
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "a-file.sock"), nil, 0o600))
	must.Succeed(t, RemoveDead(filepath.Join(dir, "a-*.sock")))

	for name, want := range map[string]bool{
		"a-served.sock": true, "a-dead.sock": false, "other-dead.sock": true, "a-file.sock": false,
	} {
		if _, err := os.Lstat(filepath.Join(dir, name)); (err == nil) != want {
			t.Errorf("%s: is there: %t, want %t", name, err == nil, want)
		}
	}
}
