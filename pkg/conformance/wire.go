// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bufio"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"
)

// Wire is the interface of a port as a pod has it: the port gets the frames that are sent into it,
// and it gives the frames that the port sends.
type Wire interface {
	// Send sends an Ethernet frame, without its frame check sequence.
	Send(frame []byte) error
	// Frames has the frames that arrive, each with its VLAN tag if it has one. What nobody takes is
	// lost.
	Frames() <-chan []byte
	Close() error
}

// Ready is the line that a command of a wire prints when it hears the interface. Each further line
// of its output is a frame that has arrived, and each line of its input a frame to be sent, in
// hexadecimal digits. It ends when its input does.
const Ready = "ready"

// maxHeard is how many frames a wire keeps that nobody has taken yet.
const maxHeard = 1024

// openWire starts a command that is the wire of a port.
func (c Commands) openWire(ctx context.Context, argv, env []string) (Wire, error) {
	ctx, cancel := context.WithCancel(ctx)
	command := exec.CommandContext(ctx, argv[0], argv[1:]...)
	command.Env, command.WaitDelay = append(os.Environ(), env...), 100*time.Millisecond
	w := &commandWire{
		name: argv[0], command: command, cancel: cancel, timeout: c.Timeout,
		errors: &tail{}, heard: make(chan []byte, maxHeard), ended: make(chan struct{}),
	}
	command.Stderr = w.errors

	out, err := command.StdoutPipe()
	if err == nil {
		w.in, err = command.StdinPipe()
	}
	if err == nil {
		err = command.Start()
	}
	if err != nil {
		cancel()
		return nil, fmt.Errorf("%s: %w", argv[0], err)
	}

	ready := make(chan struct{})
	go w.read(out, ready)
	select {
	case <-ready:
		return w, nil
	case <-w.ended:
		err = fmt.Errorf("%s: ended before it printed %q", argv[0], Ready)
	case <-time.After(c.Timeout):
		err = fmt.Errorf("%s: did not print %q in %s", argv[0], Ready, c.Timeout)
	}

	cancel()
	<-w.ended
	_ = command.Wait()
	return nil, fmt.Errorf("%w: %s", err, w.errors)
}

// commandWire is a wire that is a command.
type commandWire struct {
	name    string
	command *exec.Cmd
	cancel  context.CancelFunc
	timeout time.Duration
	in      io.WriteCloser
	errors  *tail
	heard   chan []byte
	ended   chan struct{} // closed when the output has ended
}

// read passes the frames of the output on. Lines that are no frames are ignored.
func (w *commandWire) read(out io.Reader, ready chan<- struct{}) {
	defer close(w.ended)
	for lines := bufio.NewScanner(out); lines.Scan(); {
		line := strings.TrimSpace(lines.Text())
		if line == Ready && ready != nil {
			close(ready)
			ready = nil
			continue
		}
		if frame, err := hex.DecodeString(line); err == nil && len(frame) > 0 {
			select {
			case w.heard <- frame:
			default:
			}
		}
	}
}

func (w *commandWire) Send(frame []byte) error {
	_, err := io.WriteString(w.in, hex.EncodeToString(frame)+"\n")
	if err != nil {
		return fmt.Errorf("%s: %w", w.name, err)
	}
	return nil
}

func (w *commandWire) Frames() <-chan []byte { return w.heard }

// Close ends the input of the command, and kills the command if that does not end it.
func (w *commandWire) Close() error {
	_ = w.in.Close()
	select {
	case <-w.ended:
	case <-time.After(w.timeout):
	}
	w.cancel()
	<-w.ended
	_ = w.command.Wait() // it was killed, or says why it failed, which no case depends on
	return nil
}

// Wire returns the wire of a port, which the run closes when the case ends.
func (t *T) Wire(port Port) Wire {
	t.NeedWires()
	wire, err := t.cfg.Hooks.OpenWire(t.ctx, port)
	if err != nil {
		t.Blockf("--wire for %s: %v", port.ID, err)
	}
	t.wires = append(t.wires, wire)
	return wire
}

// NeedWires ends the case unless frames can be sent and heard.
func (t *T) NeedWires() {
	if t.cfg.Hooks.OpenWire == nil {
		t.Skipf("needs --wire: frames cannot be sent")
	}
	t.NeedInterfaces()
}

// Resend is how long the run waits for a frame before it sends the frame again, and Quiet is how
// long it waits for a frame that must not arrive. Agents of hardware forward in microseconds.
const Resend, Quiet = 100 * time.Millisecond, 300 * time.Millisecond

// Heard sends frames into a wire until another wire has one that is right, and reports whether that
// was in time. It may be both ends of one wire. isRight may send frames itself.
func (t *T) Heard(from Wire, frame []byte, to Wire, isRight func(frame []byte) bool) bool {
	return t.await(func() bool {
		t.Send(from, frame)
		return t.listen(to, Resend, isRight)
	})
}

// Unheard sends frames into a wire, and reports whether another wire has none that is wrong.
func (t *T) Unheard(from Wire, frame []byte, to Wire, isWrong func(frame []byte) bool) bool {
	for range 3 {
		t.Send(from, frame)
	}
	return !t.listen(to, Quiet, isWrong)
}

// Send sends a frame into a wire. It ends the case if that fails.
func (t *T) Send(wire Wire, frame []byte) {
	if err := wire.Send(frame); err != nil {
		t.Blockf("--wire: send: %v", err)
	}
}

// listen reports whether a frame arrives in time for which is returns true.
func (t *T) listen(wire Wire, limit time.Duration, is func(frame []byte) bool) bool {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		select {
		case frame := <-wire.Frames():
			if is(frame) {
				return true
			}
		case <-timer.C:
			return false
		case <-t.ctx.Done():
			t.Blockf("the run ended before the case did")
		}
	}
}
