// SPDX-License-Identifier: GPL-2.0
/* sim_vfio_pci: a variant of vfio-pci for the VFs of QEMU's igb (8086:10ca), as mlx5_vfio_pci is
 * one for those of mlx5. It does what vfio-pci does, under a name of its own.
 */
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/vfio.h>
#include <linux/vfio_pci_core.h>

static int sim_open(struct vfio_device *core)
{
	struct vfio_pci_core_device *device = container_of(core, struct vfio_pci_core_device, vdev);
	int err = vfio_pci_core_enable(device);

	if (!err)
		vfio_pci_core_finish_enable(device);
	return err;
}

static const struct vfio_device_ops sim_ops = {
	.name = "sim-vfio-pci",
	.init = vfio_pci_core_init_dev,
	.release = vfio_pci_core_release_dev,
	.open_device = sim_open,
	.close_device = vfio_pci_core_close_device,
	.ioctl = vfio_pci_core_ioctl,
	.device_feature = vfio_pci_core_ioctl_feature,
	.read = vfio_pci_core_read,
	.write = vfio_pci_core_write,
	.mmap = vfio_pci_core_mmap,
	.request = vfio_pci_core_request,
	.match = vfio_pci_core_match,
};

static int sim_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct vfio_pci_core_device *device;
	int err;

	device = vfio_alloc_device(vfio_pci_core_device, vdev, &pdev->dev, &sim_ops);
	if (IS_ERR(device))
		return PTR_ERR(device);

	dev_set_drvdata(&pdev->dev, device);
	err = vfio_pci_core_register_device(device);
	if (err)
		vfio_put_device(&device->vdev);
	return err;
}

static void sim_remove(struct pci_dev *pdev)
{
	struct vfio_pci_core_device *device = dev_get_drvdata(&pdev->dev);

	vfio_pci_core_unregister_device(device);
	vfio_put_device(&device->vdev);
}

static const struct pci_device_id sim_ids[] = {
	{ PCI_DRIVER_OVERRIDE_DEVICE_VFIO(PCI_VENDOR_ID_INTEL, 0x10ca) },
	{ }
};
MODULE_DEVICE_TABLE(pci, sim_ids);

static struct pci_driver sim_driver = {
	.name = KBUILD_MODNAME,
	.id_table = sim_ids,
	.probe = sim_probe,
	.remove = sim_remove,
	.err_handler = &vfio_pci_core_err_handlers,
	.driver_managed_dma = true,
};
module_pci_driver(sim_driver);

MODULE_DESCRIPTION("Variant of vfio-pci for the VFs of QEMU's igb, for tests");
MODULE_LICENSE("GPL");
