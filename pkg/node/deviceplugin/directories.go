package deviceplugin

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/watchdir"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
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

// directories is where servers have their sockets, and wakes servers when something happened there.
type directories struct {
	// sockets is the directory of the servers' sockets.
	sockets string
	watch   *watchdir.Dir
	changed notify.Signal
	log     logr.Logger

	mutex sync.Mutex
	// served are the paths of sockets whose removal by somebody else matters.
	served map[string]bool
}

// openDirectories begins to watch.
func openDirectories(kubeletDir string, log logr.Logger) (*directories, error) {
	d := &directories{sockets: filepath.Join(kubeletDir, pluginsRegistry), log: log, served: map[string]bool{}}
	var err error
	if d.watch, err = watchdir.Open(d.sockets, d.matters); err != nil {
		return nil, err
	}
	if err := d.ensure(); err != nil {
		d.close()
		return nil, err
	}
	return d, nil
}

func (d *directories) close() { d.watch.Close() }

// ensure has the directory of the sockets there and watched, also if somebody removed it.
func (d *directories) ensure() error {
	if err := os.MkdirAll(d.sockets, 0o750); err != nil {
		return err
	}
	return d.watch.Watch()
}

// run wakes servers when one of their sockets went, until ctx ends.
func (d *directories) run(ctx context.Context) error {
	for loop.Wait(ctx, d.watch.Changes(), 0) {
		if err := d.ensure(); err != nil {
			d.log.Error(err, "The kubelet's directory cannot be watched")
		}
		d.changed.Notify()
	}
	return nil
}

func (d *directories) matters(event fsnotify.Event) bool {
	if !event.Has(fsnotify.Remove) && !event.Has(fsnotify.Rename) {
		return false
	}
	d.mutex.Lock()
	defer d.mutex.Unlock()
	return d.served[event.Name]
}

// forget is called before a server removes a socket itself. Its removal would have servers look for the kubelet at once
// that are to wait before they do.
func (d *directories) forget(path string) {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	delete(d.served, path)
}

// unusual is what does not belong in the name of a socket.
var unusual = regexp.MustCompile(`[^a-zA-Z0-9_]+`)

// listen makes a socket for a server of the resource that only root may use.
func (d *directories) listen(resource string) (net.Listener, string, error) {
	if err := os.MkdirAll(d.sockets, 0o750); err != nil {
		return nil, "", err
	}
	label := unusual.ReplaceAllString(resource[strings.LastIndexByte(resource, '/')+1:], "-")
	label = label[:min(len(label), maxLabel)]
	var number [4]byte
	rand.Read(number[:])
	path := filepath.Join(d.sockets, socketPrefix+label+"-"+hex.EncodeToString(number[:])+socketSuffix)
	d.mutex.Lock()
	d.served[path] = true // first, so that no removal is missed
	d.mutex.Unlock()
	listener, err := net.Listen("unix", path)
	if err != nil {
		d.forget(path)
		return nil, "", fmt.Errorf("socket %s: %w", path, err)
	}
	if err := os.Chmod(path, 0o600); err != nil && !errors.Is(err, fs.ErrNotExist) {
		d.forget(path)
		listener.Close()
		return nil, "", fmt.Errorf("socket %s: %w", path, err)
	}
	return listener, path, nil
}

// removeStale removes the sockets that a killed process left. A socket where somebody listens is another agent's, which
// is about to end.
func (d *directories) removeStale() {
	paths, _ := filepath.Glob(filepath.Join(d.sockets, socketPrefix+"*"+socketSuffix))
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
			d.log.Error(err, "A socket that nobody serves remains", "path", path)
		}
	}
}

// exists says whether a socket is still there for others to find.
func exists(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode()&fs.ModeSocket != 0
}
