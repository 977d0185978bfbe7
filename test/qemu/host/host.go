// SPDX-License-Identifier: Apache-2.0

// Package host lets a test in a guest do what a person at the machine could do: unplug a card, plug
// it again, pull the cable. The machine's side is package machine.
package host

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// PortName is the name of the virtio serial port that carries a line for a Request and a line for
// its Answer, in JSON. One process at a time can have it open.
const PortName = "xpu.host"

// Operation is an operation on a card.
type Operation string

// The operations.
const (
	OperationUnplug   Operation = "unplug"
	OperationPlug     Operation = "plug"
	OperationLinkUp   Operation = "link-up"
	OperationLinkDown Operation = "link-down"
)

// Request asks for an operation.
type Request struct {
	Operation Operation `json:"operation"`
	Card      int       `json:"card"` // counted from 0
}

// Answer reports that the operation was done, or the error.
type Answer struct {
	Error string `json:"error,omitempty"`
}

// Unplug unplugs a card. It returns when the kernel has released it: the drivers of its functions
// have ended, and their devices are gone.
func Unplug(ctx context.Context, card int) error {
	return ask(ctx, Request{Operation: OperationUnplug, Card: card})
}

// Plug plugs an unplugged card again, in the same slot and with the same MAC address. The kernel
// finds the card some time later.
func Plug(ctx context.Context, card int) error {
	return ask(ctx, Request{Operation: OperationPlug, Card: card})
}

// SetLink connects or pulls a card's cable. The kernel notices some time later.
func SetLink(ctx context.Context, card int, up bool) error {
	operation := OperationLinkDown
	if up {
		operation = OperationLinkUp
	}
	return ask(ctx, Request{Operation: operation, Card: card})
}

func ask(ctx context.Context, r Request) error {
	answer, err := exchange(ctx, r)
	if err == nil && answer.Error != "" {
		err = errors.New(answer.Error)
	}
	if err != nil {
		return fmt.Errorf("%s card %d: %w", r.Operation, r.Card, err)
	}
	return nil
}

func exchange(ctx context.Context, r Request) (Answer, error) {
	port, err := open(ctx)
	if err != nil {
		return Answer{}, err
	}
	defer port.Close()
	defer context.AfterFunc(ctx, func() { _ = port.SetDeadline(time.Unix(1, 0)) })()

	line, err := json.Marshal(r)
	if err != nil {
		return Answer{}, err
	}
	if _, err := port.Write(append(line, '\n')); err != nil {
		return Answer{}, errors.Join(context.Cause(ctx), err)
	}
	if line, err = bufio.NewReader(port).ReadBytes('\n'); err != nil {
		return Answer{}, errors.Join(context.Cause(ctx), err)
	}

	var answer Answer
	return answer, json.Unmarshal(line, &answer)
}

// open opens the port. It waits while another process has the port open.
func open(ctx context.Context) (*os.File, error) {
	device, err := find("/sys/class/virtio-ports")
	if err != nil {
		return nil, err
	}

	for {
		port, err := os.OpenFile(device, os.O_RDWR, 0)
		if !errors.Is(err, unix.EBUSY) {
			return port, err
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(context.Cause(ctx), err)
		case <-time.After(10 * time.Millisecond): // the kernel does not report a free port
		}
	}
}

// find returns the port's device node.
func find(ports string) (string, error) {
	names, err := filepath.Glob(filepath.Join(ports, "*/name"))
	if err != nil {
		return "", err
	}

	for _, file := range names {
		if name, err := os.ReadFile(file); err == nil &&
			strings.TrimSpace(string(name)) == PortName {
			return filepath.Join("/dev", filepath.Base(filepath.Dir(file))), nil
		}
	}

	return "", fmt.Errorf("this machine has no port %s: it is not a guest of test/qemu", PortName)
}
