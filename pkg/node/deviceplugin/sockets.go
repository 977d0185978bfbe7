package deviceplugin

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"syscall"
	"time"

	"github.com/go-logr/logr"
)

const (
	// pluginsRegistry is where the kubelet looks for plugins' sockets, below its directory.
	pluginsRegistry = "plugins_registry"

	// What sockets are called: "xpu-dp-fast-5a1c09e2.sock". Each is new. The kubelet knows endpoints by their path and
	// refuses one that it has, which it forgets only some time after the socket is gone.
	socketPrefix = "xpu-dp-"
	socketSuffix = ".sock"
	// maxLabel bounds the part of a socket's name that is for people. The kernel allows 107 bytes for all of the path.
	maxLabel = 20
)

// unusual is what does not belong in the name of a socket.
var unusual = regexp.MustCompile(`[^a-zA-Z0-9_]+`)

// listen makes a socket in the directory for a server of the resource, which only root may use.
func listen(dir, resource string) (net.Listener, string, error) {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, "", err
	}
	label := unusual.ReplaceAllString(filepath.Base(resource), "-")
	label = label[:min(len(label), maxLabel)]
	var number [4]byte
	rand.Read(number[:])
	path := filepath.Join(dir, fmt.Sprintf("%s%s-%x%s", socketPrefix, label, number, socketSuffix))
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, "", fmt.Errorf("socket %s: %w", path, err)
	}
	if err := os.Chmod(path, 0o600); err != nil && !errors.Is(err, fs.ErrNotExist) {
		listener.Close()
		return nil, "", fmt.Errorf("socket %s: %w", path, err)
	}
	return listener, path, nil
}

// removeStaleSockets removes the sockets that a killed process left. A socket where somebody listens is another agent's,
// which is about to end.
func removeStaleSockets(dir string, log logr.Logger) {
	paths, _ := filepath.Glob(filepath.Join(dir, socketPrefix+"*"+socketSuffix))
	for _, path := range paths {
		c, err := net.DialTimeout("unix", path, time.Second)
		if err == nil {
			c.Close()
			continue
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			continue
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			log.Error(err, "A socket that nobody serves remains", "path", path)
		}
	}
}

// exists says whether a socket is still there for others to find.
func exists(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode()&fs.ModeSocket != 0
}
