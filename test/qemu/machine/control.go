// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/opiproject/xpu-device-plugin/test/qemu/host"
)

// control carries out the requests of tests in the guest (package host). QEMU connects to both of
// its sockets.
type control struct {
	dir               string
	monitor, requests *net.UnixListener
	serving           sync.WaitGroup
	cards             int

	mu     sync.Mutex
	closed bool
	conns  []net.Conn
}

// newControl returns a control that serves until close.
func newControl(cards int) (c *control, err error) {
	// not below the output directory, because the path of a socket has at most 107 bytes
	c = &control{cards: cards}
	if c.dir, err = os.MkdirTemp("", "qemutest"); err != nil {
		return nil, err
	}

	if c.monitor, err = listen(c.monitorPath()); err == nil {
		c.requests, err = listen(c.requestsPath())
	}
	if err != nil {
		return nil, errors.Join(err, c.close())
	}

	c.serving.Go(c.serve)
	return c, nil
}

func listen(path string) (*net.UnixListener, error) {
	return net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
}

func (c *control) monitorPath() string  { return filepath.Join(c.dir, "monitor") }
func (c *control) requestsPath() string { return filepath.Join(c.dir, "requests") }

// args returns the options of QEMU for both connections and the guest's port.
func (c *control) args() []string {
	return []string{
		"-chardev", "socket,id=monitor,path=" + c.monitorPath(), "-mon",
		"chardev=monitor,mode=control",
		"-chardev", "socket,id=requests,path=" + c.requestsPath(),
		"-device", "virtio-serial-pci,bus=pcie.0", "-device",
		"virtserialport,chardev=requests,name=" + host.PortName,
	}
}

func (c *control) close() error {
	c.mu.Lock()
	c.closed = true
	conns := c.conns
	c.mu.Unlock()

	for _, l := range []*net.UnixListener{c.monitor, c.requests} {
		if l != nil {
			_ = l.Close()
		}
	}

	for _, conn := range conns {
		_ = conn.Close()
	}

	c.serving.Wait()
	return os.RemoveAll(c.dir)
}

// accept returns nil after close.
func (c *control) accept(l *net.UnixListener) net.Conn {
	conn, err := l.Accept()
	if err != nil {
		return nil
	}

	c.mu.Lock()
	defer c.mu.Unlock()

	if c.closed {
		_ = conn.Close()
		return nil
	}

	c.conns = append(c.conns, conn)
	return conn
}

func (c *control) serve() {
	monitor := c.accept(c.monitor)
	if monitor == nil {
		return
	}

	requests := c.accept(c.requests)
	if requests == nil {
		return
	}

	q := newMonitor(monitor)
	begun := q.begin()
	for lines := bufio.NewScanner(requests); lines.Scan(); {
		err := begun
		if err == nil {
			err = c.do(q, lines.Bytes())
		}

		answer := host.Answer{}
		if err != nil {
			answer.Error = err.Error()
		}

		line, err := json.Marshal(answer)
		if err != nil {
			return
		}
		if _, err := requests.Write(append(line, '\n')); err != nil {
			return
		}
	}
}

func (c *control) do(q *monitor, line []byte) error {
	var r host.Request
	if err := json.Unmarshal(line, &r); err != nil {
		return fmt.Errorf("request %q: %w", line, err)
	}
	if r.Card < 0 || r.Card >= c.cards {
		return fmt.Errorf("there is no card %d, only 0 to %d", r.Card, c.cards-1)
	}

	id := card(r.Card)["id"]
	switch r.Operation {
	case host.OperationUnplug:
		return q.remove(id)
	case host.OperationPlug:
		return q.execute("device_add", card(r.Card))
	case host.OperationLinkUp, host.OperationLinkDown:
		return q.execute("set_link",
			map[string]any{"name": id, "up": r.Operation == host.OperationLinkUp})
	}

	return fmt.Errorf("operation %q is none of package host", r.Operation)
}

// monitor is a client of the QEMU Machine Protocol (docs/interop/qmp-spec.rst of QEMU).
type monitor struct {
	conn    net.Conn
	decoder *json.Decoder
}

func newMonitor(conn net.Conn) *monitor {
	return &monitor{conn: conn, decoder: json.NewDecoder(conn)}
}

// message is a greeting, a command's result or an event.
type message struct {
	Return json.RawMessage `json:"return"`
	Error  *struct {
		Description string `json:"desc"`
	} `json:"error"`
	Event string `json:"event"`
	Data  struct {
		Device string `json:"device"`
	} `json:"data"`
}

// patience is how long QEMU, or the guest's kernel, may take for one operation.
const patience = 30 * time.Second

func (q *monitor) begin() error {
	if _, err := q.next(time.Now().Add(patience)); err != nil { // the greeting
		return err
	}
	return q.execute("qmp_capabilities", nil)
}

func (q *monitor) next(deadline time.Time) (m message, err error) {
	if err := q.conn.SetReadDeadline(deadline); err != nil {
		return message{}, err
	}
	if err := q.decoder.Decode(&m); err != nil {
		return message{}, fmt.Errorf("QEMU's monitor: %w", err)
	}
	return m, nil
}

func (q *monitor) execute(command string, arguments any) error {
	request := map[string]any{"execute": command}
	if arguments != nil {
		request["arguments"] = arguments
	}

	content, err := json.Marshal(request)
	if err != nil {
		return err
	}
	if _, err := q.conn.Write(content); err != nil {
		return fmt.Errorf("QEMU's monitor: %w", err)
	}

	for deadline := time.Now().Add(patience); ; {
		m, err := q.next(deadline)
		switch {
		case err != nil:
			return err
		case m.Error != nil:
			return fmt.Errorf("%s: %s", command, m.Error.Description)
		case m.Return != nil:
			return nil
		}
	}
}

// remove asks the guest to release a device, and waits until the device is gone.
func (q *monitor) remove(id string) error {
	if err := q.execute("device_del", map[string]string{"id": id}); err != nil {
		return err
	}
	for deadline := time.Now().Add(patience); ; {
		m, err := q.next(deadline)
		if err != nil {
			return fmt.Errorf("the guest does not let go of %s: %w", id, err)
		}
		if m.Event == "DEVICE_DELETED" && m.Data.Device == id {
			return nil
		}
	}
}
